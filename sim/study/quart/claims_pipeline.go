package quart

import (
	"fmt"
	"math"

	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// This file has the claims on what happens inside pipelines, and the claims that are inputs here.

// q6 judges the claim that Cocktail's latency grows with burstiness: at CV 8, it is 2.93 times the
// latency at CV 0.1. The growth of our latency is given beside it.
func (j *judged) q6() {
	var even, bursty []string // of the same models
	for _, m := range Models() {
		a, b := j.settings("cv=0.1", m.Name), j.settings("cv=8", m.Name)
		if len(a) == 1 && len(b) == 1 {
			even, bursty = append(even, a[0]), append(bursty, b[0])
		}
	}
	growth := func(name string) study.Interval {
		logs := func(settings []string) []float64 {
			return j.seeds(name, settings, func(o *study.Outcome, seed int) float64 { return math.Log(o.Mean.Seeds[seed]) })
		}
		return quotient(logs(bursty), logs(even))
	}
	c := study.Claim{ID: "Q6", What: "Cocktail's mean latency at CV 8, times that at CV 0.1", Paper: "2.93×"}
	got, own := growth(cocktailName), growth(oursName)
	if got.N == 0 || own.N == 0 {
		j.missing(c)
		return
	}
	c.With = "ours: " + times(own) + j.means()
	c.Values = []study.Value{{Name: "ours", Interval: own}}
	j.add(c, cocktailName, got, 2.93, 1, times)
}

// leastQueue is the smallest queue that counts. Without it, a ratio to a queue that is always empty
// would be infinite.
const leastQueue = 1e-3

// queued returns how many calls wait in all stages together.
func queued(o *study.Outcome, seed int) float64 {
	sum := 0.0
	for _, s := range o.Stages {
		sum += s.Queue.Seeds[seed]
	}
	return max(sum, leastQueue)
}

// q7 judges "as high as 10.1x", which is about the CV with the largest ratio.
func (j *judged) q7() {
	c := study.Claim{ID: "Q7", What: "requests that wait with INFless, times ours, at the CV where that is largest", Paper: "10.1×"}
	var most study.Interval
	each := ""
	for _, cv := range cvs {
		settings := j.settings(fmt.Sprintf("cv=%g", cv), "")
		got := j.ratio(inflessName, oursName, settings, queued)
		if got.N == 0 {
			continue
		}
		each += fmt.Sprintf("; CV %g: %.3g×", cv, got.Value)
		if got.Value > most.Value {
			most, c.With = got, j.circumstances(inflessName, settings)
		}
	}
	c.With += each
	if most.N == 0 {
		j.missing(c)
		return
	}
	j.add(c, "waiting, infless/ours", most, 10.1, 1, times)
}

// stageFigure returns a figure of each stage of a pipeline, by seed.
func stageFigure(o *study.Outcome, figure func(s *study.StageOutcome) study.Sample) [][]float64 {
	var out [][]float64
	for i := range o.Stages {
		out = append(out, figure(&o.Stages[i]).Seeds)
	}
	return out
}

// apart returns two ratios: the largest stage's figure divided by the smallest's, and the last
// stage's figure divided by the first's. The largest and the smallest stage are chosen by the means
// of their figures over the seeds.
func apart(stages [][]float64, least float64) (largest, last study.Interval) {
	most, fewest := 0, 0
	for i, s := range stages {
		if study.Mean(s).Value > study.Mean(stages[most]).Value {
			most = i
		}
		if study.Mean(s).Value < study.Mean(stages[fewest]).Value {
			fewest = i
		}
	}
	logs := func(s []float64) []float64 {
		out := make([]float64, len(s))
		for i, v := range s {
			out[i] = math.Log(max(v, least))
		}
		return out
	}
	return quotient(logs(stages[most]), logs(stages[fewest])), quotient(logs(stages[len(stages)-1]), logs(stages[0]))
}

// q8 judges the claim that burstiness grows from stage to stage. It holds if the last stage's CV is
// the claimed multiple of the first stage's CV, and "partly" if it is larger by less.
func (j *judged) q8() {
	for _, x := range []struct {
		id, cv, paper string
		claimed       float64
	}{{"Q8a", "1", "up to 3.5× apart, rising", 3.5}, {"Q8b", "0.1", "0.03 to 0.25: 8.3×", 0.25 / 0.03}} {
		c := study.Claim{ID: x.id, What: "arrivals' CV at the last of five stages, times the first one's, CV " + x.cv + " outside", Paper: x.paper}
		o := j.Outcome(fiveStages+x.cv, oneEach)
		if o == nil {
			j.missing(c)
			continue
		}
		largest, last := apart(stageFigure(o, func(s *study.StageOutcome) study.Sample { return s.CV }), leastQueue)
		c.With = "stages by CV:"
		for _, s := range o.Stages {
			c.With += fmt.Sprintf(" %.2f", s.CV.Mean)
		}
		c.Values = []study.Value{{Name: "largest/smallest", Interval: largest}}
		j.add(c, "last/first", last, x.claimed, 1, times)
	}
}

func (j *judged) q9() {
	c := study.Claim{ID: "Q9", What: "calls that wait at the stage with the longest of five queues, times the shortest, CV 0.1", Paper: "3×"}
	o := j.Outcome(fiveStages+"0.1", oneEach)
	if o == nil {
		j.missing(c)
		return
	}
	largest, _ := apart(stageFigure(o, func(s *study.StageOutcome) study.Sample { return s.Queue }), leastQueue)
	c.With = "stages by queue:"
	for _, s := range o.Stages {
		c.With += fmt.Sprintf(" %.3f", s.Queue.Mean)
	}
	j.add(c, "longest/shortest", largest, 3, 1, times)
}

// inputs adds the claims that are inputs of the simulation.
func (j *judged) inputs() {
	stage := Models()[0].stages()[0]
	kept := keptStart(stage.Parameters)
	j.claims = append(j.claims,
		study.Claim{
			ID: "Q10", What: "median latency with four cores against two", Paper: "−33 %", Ours: "taken as input", Verdict: study.NotMeasured,
			Why: "service times follow it: a + b/cores with b = 3.88 a",
		},
		study.Claim{
			ID: "Q11", What: "BERT-21B from disk; an eighth to the GPU; an instance from a fork", Paper: "45 s; 800 ms; < 1 s", Verdict: study.NotMeasured,
			Ours: fmt.Sprintf("taken as input; from a fork %v, parked %v", kept.Fork, kept.Parked),
			Why:  "a start is made of those, of our fork as measured (docs/RESULTS.md) and of a CUDA context, which is assumed to take 0.3 s",
		},
		study.Claim{
			ID: "Q12", What: "memory in use above which cached parameters are evicted, and which", Paper: "85 %, LRU", Ours: "taken as input", Verdict: study.NotMeasured,
			Why: "the KeysManager's default; one model at a time does not fill the memory of a server",
		})
}

// q13 judges the claim that the throughputs of replicas add up: "a stable throughput of 20 r/s". It
// holds if four replicas serve 0.95 times the throughput of four single ones, within 1 %.
func (j *judged) q13() {
	c := study.Claim{ID: "Q13", What: "requests a second of four BERT-21B in one piece, times one's 1/T", Paper: "4× (20 of 5 per second, on a V100)"}
	o := j.Outcome(fourOfIt, fourWhole)
	if o == nil {
		j.missing(c)
		return
	}
	var seconds float64
	for _, s := range j.Settings {
		if s.Name == fourOfIt {
			seconds = s.Seconds
		}
	}
	one := 1 / bert5().Time.Seconds()
	served := j.seeds(fourWhole, []string{fourOfIt}, func(o *study.Outcome, seed int) float64 {
		return o.Requests.Seeds[seed] * (1 - o.Failed.Seeds[seed]) / seconds / one
	})
	c.With = fmt.Sprintf("asked %g; one serves %.2f a second: Table 1 has 137 ms, the text about 200 ms for a V100; mean latency %.0f ms",
		4*stable, one, 1e3*o.Mean.Mean)
	j.add(c, "four/one", study.Mean(served), 4*stable*0.99, 0, times)
}
