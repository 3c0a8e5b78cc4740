package autoscaler

import (
	"context"
	"fmt"
	"maps"
	"time"

	openloop "github.com/stagecoach-serving/stagecoach/bench/load"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Settings of the pipeline minilm, which runs a real model. A replica may use a tenth of a core, so
// it is slow enough for several replicas to fit on one machine. At most, the load is 1.5 times what
// one replica of the slowest stage can serve. Then all nine stages together use at most 1.5 × 9 ×
// 0.1 = 1.35 cores.
const (
	jsonType      = "application/json"
	miniLMLimit   = "100m"
	miniLMBody    = `["` + miniLMText + miniLMText + `"]`
	miniLMText    = "The guard put his horn to his lips, the horses drew, and the coach rolled out of the yard into the rain, with six inside and eleven on the roof. "
	miniLMClients = 64 // enough to keep every stage busy
	miniLMWarm    = 2 * miniLMClients
	miniLMCalls   = 3 * miniLMClients
)

// prepareMiniLM reads the stages of the real pipeline, and measures the rate that one replica of
// each stage can serve. It sets the load to 20 % to 150 % of that rate.
func (b *autoscalerBench) prepareMiniLM(ctx context.Context) error {
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
		d := client.FromStack(name, file.Functions[name])
		d.Labels = map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "1"}
		d.Limits = &client.Resources{CPU: miniLMLimit}
		b.stages = append(b.stages, d)
	}
	one, whole, err := b.miniLMRate(ctx)
	if err != nil {
		return err
	}
	b.low, b.high, b.slo = 0.2*one, 1.5*one, 3*whole
	for i := range b.stages {
		d := &b.stages[i]
		d.Labels = map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": fmt.Sprint(b.budget)}
		d.Annotations = maps.Clone(d.Annotations)
		if d.Annotations["stagecoach.dev/slo"] != "" {
			d.Annotations["stagecoach.dev/slo"] = b.slo.String()
		}
	}
	console.Progress("bench autoscaler: minilm: a replica of the slowest stage answers %.1f requests/s on %s of a core, a request takes %v: the load goes from %.1f/s to %.1f/s, the objective is %v",
		one, miniLMLimit, whole, b.low, b.high, b.slo)
	return nil
}

// miniLMRate runs the pipeline with one replica per stage, and with enough clients to keep every
// stage busy. It returns two measurements. one is the number of answers per second, which is the
// rate of the slowest stage's replica. whole is the mean service time of a request: the sum over
// its stages, from the Server-Timing headers. A rate that is computed from service times would be
// too high, because a process that has used up its CPU quota also pauses between calls.
func (b *autoscalerBench) miniLMRate(ctx context.Context) (one float64, whole time.Duration, err error) {
	err = running.OnUp(ctx, []string{"--images", b.images, "--ort", b.ort}, func(api *client.Client) error {
		if err := running.DeployAll(ctx, api, b.stages); err != nil {
			return err
		}
		if _, err := running.Saturate(ctx, api, b.pipeline, jsonType, b.body, miniLMClients, miniLMWarm, nil); err != nil {
			return err
		}
		calls := 0
		took, err := running.Saturate(ctx, api, b.pipeline, jsonType, b.body, miniLMClients, miniLMCalls, func(a client.Answer) {
			calls++
			for _, s := range openloop.ServerTiming(a.Header.Get("Server-Timing")) {
				whole += s.Service
			}
		})
		if err != nil {
			return err
		}
		if whole == 0 {
			return fmt.Errorf("no service time in the Server-Timing of %d answers", calls)
		}
		one, whole = float64(calls)/took.Seconds(), (whole / time.Duration(calls)).Round(time.Millisecond)
		return nil
	})
	return one, whole, err
}
