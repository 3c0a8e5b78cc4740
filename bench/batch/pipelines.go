package batch

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"runtime"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/running"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// subject is a pipeline some of whose stages take batches.
type subject struct {
	name    string
	stages  []stage
	content string // content type of a request
	body    []byte
	slo     time.Duration
}

type stage struct {
	name, image string // name is empty for a pipeline of one stage
	env         map[string]string
	each, batch bool
}

// torchPipeline is MiniLM with its six layers in PyTorch. A request has one text.
func torchPipeline() subject {
	s := subject{name: "torch", content: "text/plain", body: []byte(text), slo: pipelineObjective}
	s.stages = append(s.stages, stage{name: "embed", image: "minilm-embed", env: map[string]string{"STAGECOACH_MODEL": "model/embed.onnx"}})
	for i := 1; i <= 6; i++ {
		s.stages = append(s.stages, stage{
			name: fmt.Sprintf("layer-%d", i), image: fmt.Sprintf("minilm-torch-layer-%d", i), each: true, batch: true,
			env: map[string]string{"STAGECOACH_RUNTIME": "python", "STAGECOACH_MODEL": "model.safetensors"},
		})
	}
	s.stages = append(s.stages, stage{name: "pool", image: "minilm-pool", env: map[string]string{"STAGECOACH_MODEL": "model/pool.onnx"}})
	return s
}

// ocrPipeline is OCR, in which recognition takes batches. A request has a page of a few lines.
func ocrPipeline() (subject, error) {
	p, err := page.Draw(page.Options{Seed: 9, Width: 500, Height: 160, Size: 16})
	if err != nil {
		return subject{}, err
	}
	return subject{name: "ocr", content: "image/png", body: p.PNG, slo: pipelineObjective, stages: []stage{
		{name: "detect", image: "ocr-detect", env: map[string]string{"STAGECOACH_MODEL": "model/det.onnx"}},
		{name: "recognise", image: "ocr-recognise", env: map[string]string{"STAGECOACH_MODEL": "model/rec.onnx"}, each: true, batch: true},
		{name: "text", image: "ocr-text"},
	}}, nil
}

// pipeline returns the name of a copy of the pipeline.
func (s *subject) pipeline(of string) string { return s.name + "-" + of }

// function returns the name of a stage's function.
func (s *subject) function(of string, st stage) string {
	return strings.TrimSuffix(s.pipeline(of)+"-"+st.name, "-")
}

// begin deploys both copies, and gives profiles to the one that chooses its batches. p is the
// profile of its only stage; without points, profiles are measured under load.
func (s *subject) begin(ctx context.Context, api *client.Client, p profile.Profile, calls int) error {
	if err := s.deploy(ctx, api, off, "1"); err != nil {
		return err
	}
	if len(p.Points) == 0 {
		if err := s.learn(ctx, api, calls); err != nil {
			return err
		}
	} else {
		if err := s.deploy(ctx, api, auto, autoBatch); err != nil {
			return err
		}
		if err := put(ctx, api, s.function(auto, s.stages[0]), p.Points); err != nil {
			return err
		}
		if err := chosen(ctx, api, s.pipeline(auto), 1); err != nil {
			return err
		}
	}
	for _, of := range []string{off, auto} {
		if _, err := running.Saturate(ctx, api, s.pipeline(of), s.content, string(s.body), largest, largest, nil); err != nil {
			return err
		}
	}
	return nil
}

var autoBatch = fmt.Sprintf("auto:%d", largest)

// put stores the profile of a function.
func put(ctx context.Context, api *client.Client, function string, points []profile.Point) error {
	return api.Send(ctx, "profile "+function, http.MethodPut, "/system/function/"+function+"/profile",
		profile.Profile{Version: profile.Version, Relative: 0.05, Points: points})
}

// deploy deploys a copy of the pipeline with these batches. Each stage has one replica.
func (s *subject) deploy(ctx context.Context, api *client.Client, of, batch string) error {
	pipeline := s.pipeline(of)
	var all []client.Deployment
	for i, st := range s.stages {
		d := client.Deployment{
			Service: s.function(of, st), Image: "stagecoach/" + st.image + ":0.1.0", EnvVars: st.env,
			Labels:      map[string]string{"com.openfaas.scale.min": "1", "com.openfaas.scale.max": "1"},
			Annotations: map[string]string{},
		}
		if len(s.stages) > 1 {
			d.Annotations["stagecoach.dev/pipeline"] = pipeline
		}
		if i == 0 {
			d.Annotations["stagecoach.dev/slo"] = s.slo.String()
		}
		if i+1 < len(s.stages) {
			d.Annotations["stagecoach.dev/next"] = s.function(of, s.stages[i+1])
		}
		if st.each {
			d.Annotations["stagecoach.dev/each"] = "true"
		}
		if st.batch {
			d.Annotations["stagecoach.dev/batch"] = batch
		}
		all = append(all, d)
	}
	return running.DeployAll(ctx, api, all)
}

// learn measures how long batches of each size take under load, and stores that as the profiles of
// the stages. Then it lets auto choose, and waits for the choice.
func (s *subject) learn(ctx context.Context, api *client.Client, calls int) error {
	points := map[string][]profile.Point{}
	for n := 1; n <= largest; n *= 2 {
		if err := s.deploy(ctx, api, auto, fmt.Sprint(n)); err != nil {
			return err
		}
		if _, err := running.Saturate(ctx, api, s.pipeline(auto), s.content, string(s.body), largest, calls, nil); err != nil {
			return err
		}
		for _, st := range s.stages {
			if !st.batch {
				continue
			}
			name := s.function(auto, st)
			took, err := api.Metric(ctx, fmt.Sprintf(`stagecoach_dispatch_batch_seconds{function="%s.openfaas-fn",size="%d"}`, name, n))
			if err != nil {
				continue // the load made no batch of this size
			}
			p := profile.Point{Cell: profile.Cell{CPUMilli: 1000 * runtime.NumCPU(), Batch: n}, Mean: took, N: calls}
			points[name] = append(points[name], p)
		}
	}
	for name, all := range points {
		if err := put(ctx, api, name, all); err != nil {
			return err
		}
	}
	if err := s.deploy(ctx, api, auto, autoBatch); err != nil {
		return err
	}
	return chosen(ctx, api, s.pipeline(auto), len(points))
}

// chosen waits until the autoscaler has chosen a batch from the profiles of as many stages.
func chosen(ctx context.Context, api *client.Client, name string, stages int) error {
	ctx, cancel := context.WithTimeout(ctx, client.ReadyPatience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		var x schema.Explanation
		if err := api.Get(ctx, "/system/pipelines/"+name+"/explain", &x); err != nil {
			return err
		}
		n := 0
		for _, st := range x.Stages {
			if strings.Contains(st.Why, " of up to ") {
				n++
			}
		}
		if n >= stages {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d of %d stages of %s have chosen a batch: %w", n, stages, name, ctx.Err())
		case <-tick.C:
		}
	}
}

// limit adds how much faster the stages' batches make them, by the profiles, to the report.
func (s *subject) limit(ctx context.Context, api *client.Client, report *bench.Report) error {
	for n := 1; n <= largest; n *= 2 {
		one, all, count := 0.0, 0.0, 0
		for _, st := range s.stages {
			if !st.batch {
				continue
			}
			var p profile.Profile
			if err := api.Get(ctx, "/system/function/"+s.function(auto, st)+"/profile", &p); err != nil {
				return err
			}
			for _, at := range p.Points {
				if at.Batch == 1 {
					one += at.Mean
				}
				if at.Batch == n {
					all, count = all+at.Mean/float64(n), count+1
				}
			}
		}
		if count > 0 && one > 0 && !math.IsNaN(all) {
			report.Add(fmt.Sprintf("%s_batch%d", s.name, n), "times_faster", one/all, count)
		}
	}
	return nil
}
