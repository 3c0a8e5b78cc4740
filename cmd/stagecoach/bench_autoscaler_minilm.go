package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/load"
	"github.com/stagecoach-serving/stagecoach/stack"
)

// What the pipeline that computes is deployed with. A replica may use a tenth of a core, so that it is a slow server and several fit on
// one machine: at 1.5 times the rate of the slowest stage's one replica, eight stages use at most 1.5 × 8 × 0.1 = 1.2 cores.
const (
	miniLMLimit   = "100m"
	miniLMBody    = `["a short text to be embedded"]`
	miniLMClients = 16 // as many as keep every stage busy
	miniLMWarm    = 100
	miniLMCalls   = 400
)

// prepareMiniLM takes the real pipeline of eight stages, and measures what one replica of each can do: the load goes from 20 % to 150 % of
// the slowest one's rate.
func (b *autoscalerBench) prepareMiniLM(ctx context.Context, labels map[string]string) error {
	file, err := stack.Read("functions/minilm/stack.yml")
	if err != nil {
		return err
	}
	names, err := file.Names("")
	if err != nil {
		return err
	}
	b.pipeline, b.body = "minilm", miniLMBody
	for _, name := range names {
		d := stackDeployment(name, file.Functions[name])
		d.Labels = map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "1"}
		d.Limits = &resources{CPU: miniLMLimit}
		b.stages = append(b.stages, d)
	}
	one, whole, err := b.miniLMRate(ctx)
	if err != nil {
		return err
	}
	b.low, b.high, b.slo = 0.2*one, 1.5*one, 3*whole
	for i := range b.stages {
		d := &b.stages[i]
		d.Labels = labels
		d.Annotations = maps.Clone(d.Annotations)
		if d.Annotations["stagecoach.dev/slo"] != "" {
			d.Annotations["stagecoach.dev/slo"] = b.slo.String()
		}
	}
	progress("bench autoscaler: minilm: a replica of the slowest stage answers %.1f requests/s on %s of a core, a request takes %v: the load goes from %.1f/s to %.1f/s, the objective is %v",
		one, miniLMLimit, whole, b.low, b.high, b.slo)
	return nil
}

// miniLMRate is how many requests a second one replica of the slowest stage answers, and how long a request is computed, from the
// Server-Timing of answers while every stage is busy: a quota shows only when it has been used up.
func (b *autoscalerBench) miniLMRate(ctx context.Context) (one float64, whole time.Duration, err error) {
	err = onUp(ctx, []string{"--images", b.images, "--ort", b.ort, "--corrector", "none"}, func(api *client) error {
		if err := deployAll(ctx, api, b.stages); err != nil {
			return err
		}
		if _, err := saturate(ctx, api, b.pipeline, "application/json", b.body, miniLMClients, miniLMWarm, nil); err != nil {
			return err
		}
		sums, calls := map[string]time.Duration{}, 0
		_, err := saturate(ctx, api, b.pipeline, "application/json", b.body, miniLMClients, miniLMCalls, func(a answer) {
			calls++
			for _, s := range openloop.ServerTiming(a.header.Get("Server-Timing")) {
				sums[s.Stage] += s.Service
			}
		})
		if err != nil {
			return err
		}
		slowest := time.Duration(0)
		for _, d := range b.stages {
			mean := sums[d.Service] / time.Duration(calls)
			if mean <= 0 {
				return fmt.Errorf("%s: no service time in the Server-Timing of %d answers", d.Service, calls)
			}
			slowest, whole = max(slowest, mean), whole+mean
		}
		one = 1 / slowest.Seconds()
		return nil
	})
	return one, whole, err
}
