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

// Settings of the pipeline that computes. A replica may use a tenth of a core, so that it is a slow
// server and several fit on one machine. At 1.5 times the rate of one replica of the slowest stage,
// eight stages use at most 1.5 × 8 × 0.1 = 1.2 cores.
const (
	jsonType      = "application/json"
	miniLMLimit   = "100m"
	miniLMBody    = `["` + miniLMText + miniLMText + `"]`
	miniLMText    = "The guard put his horn to his lips, the horses drew, and the coach rolled out of the yard into the rain, with six inside and eleven on the roof. "
	miniLMClients = 64 // enough to keep every stage busy
	miniLMWarm    = 2 * miniLMClients
	miniLMCalls   = 3 * miniLMClients
)

// prepareMiniLM deploys the real pipeline of eight stages, and measures the rate of one replica of
// each. The load goes from 20 % to 150 % of the slowest one's rate.
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

// miniLMRate returns how many requests per second one replica of the slowest stage answers. It is
// the rate of the chain when every line is full. A request's time is that of its stages, from the
// Server-Timing of the answers. The slowest service time alone would give too large a rate, because
// a process whose quota is used up also stands still between its calls.
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
