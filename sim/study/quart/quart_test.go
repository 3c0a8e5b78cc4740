package quart

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// none is an Opener without files.
func none(string) (io.ReadCloser, error) { return nil, fs.ErrNotExist }

func TestStudiesAreValid(t *testing.T) {
	full, err := Full(none)
	if err != nil {
		t.Fatal(err)
	}
	quick := Quick()
	for _, s := range []*study.Study{&full, &quick} {
		if err := s.Check(); err != nil {
			t.Error(err)
		}
	}
	if n := len(full.LeftOut); n != len(traces())+1 {
		t.Errorf("%d settings left out without data, want every trace and azure-functions: %v", n, full.LeftOut)
	}
	broken := func(string) (io.ReadCloser, error) { return nil, os.ErrPermission }
	if _, err := Full(broken); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a trace that cannot be read: %v, want the cause", err)
	}
}

// TestModels checks the load, the cluster and the sizes of every model.
func TestModels(t *testing.T) {
	for _, m := range append(Models(), bert5()) {
		s := m.scenario(m.Name, renewal(m.Rate(), 1))
		var busy float64
		var sum time.Duration
		for _, st := range s.Stages {
			mean := st.Service.Profile[0].Mean // declared cores, no batch
			sum += mean
			busy += m.Rate() * mean.Seconds()
			for _, start := range []sim.Start{plainStart(st.Parameters), keptStart(st.Parameters)} {
				if start.Parked >= start.Fork || start.Fork >= start.Cold {
					t.Errorf("%s: starts %+v, want parked < fork < cold", m.Name, start)
				}
			}
			if a, b := plainStart(st.Parameters), keptStart(st.Parameters); a.Cold != b.Cold {
				t.Errorf("%s: from disk %v and %v, want the same of all", m.Name, a.Cold, b.Cold)
			}
		}
		if math.Abs(busy-work) > 1e-3 || (sum-m.Time).Abs() > time.Microsecond {
			t.Errorf("%s: %g GPUs of work, %v of service; want %d, %v", m.Name, busy, sum, work, m.Time)
		}
		w := whole(s)
		if one := w.Stages[0]; (one.Service.Profile[0].Mean-sum).Abs() > 0 || one.GPU*w.Budget > gpus || len(w.Stages) != 1 {
			t.Errorf("%s as a whole: %+v, want the stages' time", m.Name, one)
		}
	}
}

func TestWholeModelsHaveTheirGPUs(t *testing.T) {
	want := map[string]int{bert: 1, llama: 1, whisper: 1, opt: 3, resnet: 1}
	for _, m := range Models() {
		if got := whole(m.scenario(m.Name, renewal(1, 1))).Stages[0].GPU; got != want[m.Name] {
			t.Errorf("%s: %d GPUs, want %d", m.Name, got, want[m.Name])
		}
	}
}

// TestFourCoresTakeAThirdLessTimeThanTwo checks section 3.4: four cores take 33 % less time than
// two.
func TestFourCoresTakeAThirdLessTimeThanTwo(t *testing.T) {
	if got := quota(4) / quota(2); math.Abs(got-0.67) > 1e-9 || quota(cores) != 1 {
		t.Errorf("four cores take %g of two, want 0.67; %g of what is declared, want 1", got, quota(cores))
	}
}

// TestContendersStayWithinTheCluster simulates a few seconds of every contender, with its defaults
// and with another configuration. Every plan must be valid. The contender must decide at every
// tick, answer requests, and use no more GPUs than the cluster has.
func TestContendersStayWithinTheCluster(t *testing.T) {
	for _, c := range contenders() {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			settings := append([]study.Setting{gammaSetting(Models()[1], 4)}, observations()...)
			x := settings[slices.IndexFunc(settings, func(x study.Setting) bool { return c.In == nil || c.In(x) })]
			for i, knobs := range c.Candidates(2) {
				s := x.Scenario(true)
				s.Warmup, s.Duration = 0, 5*time.Second
				m, err := c.Apply(s, knobs).Model(none)
				if err != nil {
					t.Fatal(err)
				}
				f, err := m.One(t.Context(), 0, 7)
				if err != nil {
					t.Fatal(err)
				}
				p := &f.Pipelines[0]
				if f.Refused+f.Held > 0 || p.Answered < p.Offered/10 {
					t.Errorf("candidate %d %v: %g plans refused, %g domains held (%s), %g of %g requests answered", i, knobs, f.Refused, f.Held, f.Complaint, p.Answered, p.Offered)
				}
				if f.DeviceSeconds > gpus*f.Seconds*1.001 || f.DeviceSeconds == 0 {
					t.Errorf("%v: %g GPU-seconds, want some, and at most those of %d", knobs, f.DeviceSeconds, gpus)
				}
			}
		})
	}
}

// TestInputsMatchTheGoldenFile compares the inputs with a golden file: stages, their times and
// starts, and the load.
func TestInputsMatchTheGoldenFile(t *testing.T) {
	var b strings.Builder
	for _, m := range append(Models(), bert5()) {
		s := m.scenario(m.Name, renewal(m.Rate(), 1))
		fmt.Fprintf(&b, "%s: %.2f GiB, %v, %.2f requests a second, batches of %d at %.3f\n", m.Name, m.Size(), m.Time, m.Rate(), m.Batch, m.BatchCost)
		for _, st := range append(s.Stages, whole(s).Stages...) {
			fmt.Fprintf(&b, "  %-5s %6.2f GiB, %d GPUs, %d slots, at most %d;", st.Name, float64(st.Parameters)/gib, st.GPU, st.Slots, st.Max)
			for _, p := range st.Service.Profile {
				fmt.Fprintf(&b, " %d/%d %v", p.CPU/1000, p.Batch, p.Mean.Round(10*time.Microsecond))
			}
			fmt.Fprintf(&b, "; plain %v, kept %v\n", plainStart(st.Parameters), keptStart(st.Parameters))
		}
	}
	golden.Compare(t, "physics.txt", b.String())
}

// TestQuick evaluates the small study. The figures of fixed replica counts are compared exactly,
// because they follow from arrivals, work and starts. The figures of ours only need to be in a
// range, because they change with every change of the policy.
func TestQuick(t *testing.T) {
	s := Quick()
	for i := range s.Settings { // shorter, because this runs with the race detector
		x := &s.Settings[i]
		scenario := x.Scenario
		x.Scenario = func(train bool) sim.Scenario {
			s := scenario(train)
			s.Warmup, s.Duration = 2*time.Second, 10*time.Second
			return s
		}
	}
	r, err := s.Evaluate(t.Context(), study.Tuned{}, none, nil)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, x := range r.Settings {
		o, own := r.Outcome(x.Name, "static"), r.Outcome(x.Name, oursName)
		fmt.Fprintf(&b, "%s: %.0f requests, mean %.4g s, p99 %.4g s, within %g T %.4g, %.4g GPUs\n", x.Name, o.Requests.Mean, o.Mean.Mean, o.P99.Mean, r.Objective, o.InTime[2].Mean, o.GPUs.Mean)
		if own.Failed.Mean > 0 || own.Mean.Mean < x.Service || own.Mean.Mean > 10*x.Service || own.GPUs.Mean > gpus || own.GPUs.Mean < stages {
			t.Errorf("ours on %s: %+v with %+v GPUs, %+v failed; want all answered in 1 to 10 times %g s, with %d to %d GPUs", x.Name, own.Mean, own.GPUs, own.Failed, x.Service, stages, gpus)
		}
	}
	golden.Compare(t, "quick.txt", b.String())
	ids := map[string]bool{}
	for _, c := range r.Claims {
		if ids[c.ID] || c.What == "" || c.Paper == "" || c.Verdict == "" || c.Ours == "" && c.Verdict != study.NotMeasured {
			t.Errorf("claim %+v: want an id of its own and all that is said of one", c)
		}
		ids[c.ID] = true
	}
	if len(ids) != 30 {
		t.Errorf("%d claims, want 30: %v", len(ids), ids)
	}
}

func TestVerdict(t *testing.T) {
	of := func(low, high float64) study.Interval {
		return study.Interval{Value: (low + high) / 2, Low: low, High: high, N: 10}
	}
	for name, c := range map[string]struct {
		got              study.Interval
		claimed, neutral float64
		want             study.Verdict
	}{
		"less, as claimed":          {of(0.5, 0.7), 0.6, 1, study.Holds},
		"less, more than claimed":   {of(0.2, 0.3), 0.6, 1, study.Holds},
		"less, not as much":         {of(0.7, 0.9), 0.6, 1, study.Partly},
		"perhaps less":              {of(0.5, 1.1), 0.6, 1, study.No},
		"more instead":              {of(1.2, 1.4), 0.6, 1, study.No},
		"more, as claimed":          {of(2, 4), 3, 1, study.Holds},
		"more, not as much":         {of(1.5, 2), 3, 1, study.Partly},
		"more was claimed, less is": {of(0.5, 0.9), 3, 1, study.No},
		"one seed":                  {study.Interval{Value: 5, Low: 5, High: 5, N: 1}, 3, 1, study.NotMeasured},
		"nothing known":             {of(math.NaN(), math.NaN()), 3, 1, study.No},
	} {
		if got := verdict(c.got, c.claimed, c.neutral); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestAveragesAreTheHarderOnes checks that each kind of figure has the average that favours ours
// less: arithmetic for reductions of latency, and geometric for multiples of goodput. For requests
// in time, both sides are averaged before they are divided.
func TestAveragesAreTheHarderOnes(t *testing.T) {
	r := made(t)
	n := r.Seeds.N
	fixed := func(v float64) study.Sample { return study.Sample{Mean: v, Seeds: slices.Repeat([]float64{v}, n)} }
	for _, x := range r.Settings {
		own, to := r.Outcome(x.Name, oursName), r.Outcome(x.Name, cocktailName)
		if own == nil {
			continue
		}
		ours, theirs, good, bad := 1.0, 2.0, 0.5, 0.5
		if x.Model == bert {
			ours, good, bad = 0.2, 1, 0.01
		}
		own.Mean, to.Mean, own.Goodput, to.Goodput = fixed(ours), fixed(theirs), fixed(10*good), fixed(10*bad)
		for k := range r.Multiples {
			own.InTime[k], to.InTime[k] = fixed(good), fixed(bad)
		}
	}
	got := map[string]float64{}
	for _, c := range judge(r) {
		if len(c.Values) > 0 {
			got[c.ID] = c.Values[0].Value
		}
	}
	for id, want := range map[string]float64{
		"Q4c": (4*0.5 + 0.1) / 5,    // over five models; the geometric mean is 0.36
		"Q5c": math.Pow(100, 1.0/5), // the arithmetic mean is 20.8
		// five models on azure-code and two on azure-conv, with one BERT-21B each
		"Q3c": (5*0.5 + 2) / (5*0.5 + 0.02),
		"Q6":  1,
	} {
		if math.Abs(got[id]-want) > 1e-4 {
			t.Errorf("%s: %g, want %g", id, got[id], want)
		}
	}
}

// TestReasonsFitTheirVerdicts checks that a reason is given only with the verdict that it explains.
func TestReasonsFitTheirVerdicts(t *testing.T) {
	ids := map[string]bool{}
	for _, c := range judge(made(t)) {
		ids[c.ID] = true
		if r, ok := reasons[c.ID]; ok && (c.Why == r.why) != (c.Verdict == r.verdict) {
			t.Errorf("%s, %s: %q", c.ID, c.Verdict, c.Why)
		}
	}
	for id, r := range reasons {
		if !ids[id] || r.why == "" {
			t.Errorf("a reason of %s, which is no claim, or none: %q", id, r.why)
		}
	}
}

// TestClaimsAreJudgedWithTwins checks that a study without the paper's opponents, such as the
// headline, judges the claims with the opponents that have eight cores, and says so.
func TestClaimsAreJudgedWithTwins(t *testing.T) {
	r := made(t)
	for i := range r.Outcomes {
		if o := &r.Outcomes[i]; o.Contender == oursName { // fast, so that some claims hold
			o.Mean = each(r.Seeds.N, o.Mean.Mean/20)
		}
	}
	published, explained := map[string]study.Claim{}, 0
	for _, c := range judge(r) {
		if published[c.ID] = c; strings.Contains(c.With, "GPU-seconds") && c.Why != "" {
			explained++
		}
	}
	r.Outcomes = slices.DeleteFunc(r.Outcomes, func(o study.Outcome) bool { return slices.Contains(three, o.Contender) })
	n := 0
	for _, c := range judge(r) {
		p := published[c.ID]
		if !strings.Contains(p.With, "GPU-seconds") { // not against one of the three
			continue
		}
		if n++; c.Why != "" || !strings.Contains(c.With, "eight cores") || c.Ours == p.Ours || strings.Contains(p.With, "eight cores") {
			t.Errorf("%s: %q, %q, %q; with the published ones %q, %q", c.ID, c.Ours, c.With, c.Why, p.Ours, p.With)
		}
	}
	if n != 21 || explained == 0 {
		t.Errorf("%d claims against the three, want 21; %d have a reason with the published ones, want some", n, explained)
	}
}

// TestHeadlineIsAPartOfFull checks that the headline's settings and contenders are in the full
// evaluation, and that it is much smaller. Only contenders with equal means, ours and the oracle
// are in it.
func TestHeadlineIsAPartOfFull(t *testing.T) {
	full, err := Full(none)
	if err != nil {
		t.Fatal(err)
	}
	head, err := Headline(none)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range head.Settings {
		if !slices.ContainsFunc(full.Settings, func(y study.Setting) bool { return x.Name == y.Name && x.Group == y.Group }) {
			t.Errorf("setting %s is not in the full evaluation", x.Name)
		}
	}
	for _, c := range head.Contenders {
		if !slices.ContainsFunc(full.Contenders, func(d study.Contender) bool { return c.Name == d.Name }) {
			t.Errorf("contender %s is not in the full evaluation", c.Name)
		}
		if !c.Ours && c.Cores != mostCores {
			t.Errorf("contender %s has %d cores, want %d", c.Name, c.Cores, mostCores)
		}
	}
	if a, b := runs(&head), runs(&full); a*2 > b {
		t.Errorf("%d runs in the headline, %d in the full evaluation", a, b)
	}
}

// runs returns how many runs an evaluation makes.
func runs(s *study.Study) int {
	n := 0
	for _, x := range s.Settings {
		for _, c := range s.Contenders {
			if c.In == nil || c.In(x) {
				n += s.Test.N
			}
		}
	}
	if s.More != nil {
		n += runs(s.More)
	}
	return n
}
