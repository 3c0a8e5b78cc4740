package sim

import (
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
)

// station is one stage with a fixed number of replicas and a line.
const station = `
name: a queue
duration: DURATION
warmup: WARMUP
seeds: 5
hop: 0s
tick: 1h
policies: [{allocator: fixed, corrector: none, sharer: none, warmer: none}] # nothing is to be decided
nodes: [{memory: 1Ti, cpu: 1000}]
pipelines: [{name: p, timeout: 9000h, arrivals: {rate: "RATE", cv: CV}}]
stages: [{name: s, service: {SERVICE}, min: SERVERS, max: SERVERS, queueLimit: 1000000}]
`

// sojourn simulates a station with a mean service time of 100 ms. With SIM_LONG=1 in the
// environment, it simulates twenty times as many requests.
func sojourn(t *testing.T, servers int, rho, cv float64, service string) Estimate {
	t.Helper()
	return stationary(t, servers, rho, cv, service).Mean
}

func stationary(t *testing.T, servers int, rho, cv float64, service string) PipelineResult {
	t.Helper()
	requests := 6000.0
	if os.Getenv("SIM_LONG") != "" {
		requests *= 20
	}
	rate := 10 * rho * float64(servers)
	// At a utilisation of 0.9, M/M/c forgets its start with a time constant of 1/cμ(1−√ρ)² (Abate
	// and Whitt 1987). The warm-up is at least seven of these time constants.
	warmup := time.Duration(min(2700/rate, 300) * float64(time.Second))
	duration := time.Duration(requests/rate*float64(time.Second)) + warmup
	r := simulate(t, fill(station, "DURATION", duration.String(), "WARMUP", warmup.String(), "RATE", fmt.Sprint(rate), "CV", fmt.Sprint(cv), "SERVICE", "mean: 100ms, "+service,
		"SERVERS", fmt.Sprint(servers)))
	p := r.Policies[0]
	p.Stages[0].Utilisation.want(t, "utilisation", rho, 0.02)
	p.Stages[0].Replicas.want(t, "replicas", float64(servers), 0)
	p.Stages[0].Service.want(t, "service time", 0.1, 0.01)
	return p.Pipelines[0]
}

// TestErlangC compares the simulated sojourn of M/M/c queues with theory: the wait is C(c,
// a)/(cμ−λ).
func TestErlangC(t *testing.T) {
	for _, tc := range []struct {
		servers int
		rho     float64
		want    float64 // Erlang's C, from tables (Cooper 1981)
	}{{1, 0.8, 0.8}, {2, 0.75, 0.642857}, {10, 0.9, 0.668732}} {
		t.Run(fmt.Sprintf("c=%d rho=%g", tc.servers, tc.rho), func(t *testing.T) {
			t.Parallel()
			wait := tc.want / (10 * float64(tc.servers) * (1 - tc.rho))
			got := stationary(t, tc.servers, tc.rho, 1, "dist: exponential")
			got.Mean.want(t, "sojourn", wait+0.1, 0.005)
			if tc.servers == 1 { // first come, first served: the sojourn is exponential
				got.P50.want(t, "median", (wait+0.1)*math.Ln2, 0.01)
				got.P99.want(t, "p99", (wait+0.1)*math.Log(100), 0.01)
			}
			// The policies' formula must agree.
			mean := autoscaler.Sojourn(10*tc.rho*float64(tc.servers), 10, tc.servers, 1, 1, 0)
			if math.Abs(mean.Seconds()-wait-0.1) > 1e-4 {
				t.Errorf("autoscaler.Sojourn is %v, want %v", mean, time.Duration((wait+0.1)*float64(time.Second)))
			}
		})
	}
}

// TestPollaczekKhinchine compares M/G/1 queues with the exact wait, which is ρ/(1−ρ)·(1+Cs²)/2
// times the mean service time.
func TestPollaczekKhinchine(t *testing.T) {
	for service, cs2 := range map[string]float64{
		"dist: deterministic": 0, "dist: lognormal, cv: 1.5": 2.25,
	} {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			got := sojourn(t, 1, 0.7, 1, service)
			got.want(t, "sojourn", 0.1+0.1*0.7/0.3*(1+cs2)/2, 0.005)
		})
	}
}

// TestKingman compares G/G/c queues in heavy traffic with approximations of the wait: Kingman's for
// one server, and Allen and Cunneen's for several servers, which is (Ca²+Cs²)/2 times the wait of
// M/M/c. Kingman's approximation is an upper bound, which the test checks as well. For G/M/1, it
// also compares with the exact wait.
func TestKingman(t *testing.T) {
	erlang := map[int]float64{1: 0.9, 4: 0.787776}
	for _, tc := range []struct {
		servers int
		ca      float64
		service string
		cs2     float64
		part    float64 // accepted relative error of the approximation
	}{
		{1, 0.5, "dist: gamma, cv: 0.5", 0.25, 0.12},
		{1, 2, "dist: exponential", 1, 0.05},
		{4, 2, "dist: lognormal, cv: 0.5", 0.25, 0.08},
	} {
		t.Run(fmt.Sprintf("c=%d Ca=%g Cs²=%g", tc.servers, tc.ca, tc.cs2), func(t *testing.T) {
			t.Parallel()
			got := sojourn(t, tc.servers, 0.9, tc.ca, tc.service)
			wait := erlang[tc.servers] / (10 * float64(tc.servers) * 0.1) * (tc.ca*tc.ca + tc.cs2) / 2
			got.want(t, "sojourn", 0.1+wait, tc.part)
			if tc.servers == 1 && got.Mean-got.CI > 0.1+wait {
				t.Errorf("sojourn %+v, want at most Kingman's bound, %g", got, 0.1+wait)
			}
			if tc.servers == 1 && tc.service == "dist: exponential" {
				got.want(t, "sojourn of G/M/1", 0.1/(1-root(0.9, tc.ca)), 0.01)
			}
		})
	}
}

// root returns σ of a G/M/1 queue with gamma arrivals: the solution below 1 of σ = A*(μ(1−σ)). A*
// is the Laplace transform of the times between arrivals, (1 + sθ)^−k (Kleinrock 1975, §6.4).
func root(rho, ca float64) float64 {
	k := 1 / (ca * ca)
	sigma := rho
	for range 1000 {
		sigma = math.Pow(1+(1-sigma)/(rho*k), -k)
	}
	return sigma
}

// TestJackson checks that two stages in a row are two independent M/M/1 queues (Jackson 1957; Burke
// 1956). That holds if a request's service times are independent.
func TestJackson(t *testing.T) {
	t.Parallel()
	r := simulate(t, `
duration: 1200s
warmup: 100s
seeds: 5
hop: 0s
tick: 1h
policies: [{allocator: fixed, corrector: none, sharer: none, warmer: none}] # nothing is to be decided
nodes: [{memory: 1Ti, cpu: 1000}]
pipelines: [{name: p, timeout: 9000h, arrivals: {rate: "7"}}]
stages: [{name: a, next: b, service: {mean: 100ms}, min: 1, max: 1, queueLimit: 1000000}, {name: b, service: {mean: 100ms}, min: 1, max: 1, queueLimit: 1000000}]
`)
	for _, s := range r.Policies[0].Stages {
		s.Wait.want(t, "wait for "+s.Name, 0.1*0.7/0.3, 0.01)
		s.CV.want(t, "CV of arrivals at "+s.Name, 1, 0.01)
	}
}

// TestLittle checks Little's law through stages, batches and slots: the mean number of requests in
// the system is their rate times their mean latency.
func TestLittle(t *testing.T) {
	r := simulate(t, `
duration: 300s
warmup: 30s
seeds: 2
nodes: [{memory: 1Ti, cpu: 1000}]
pipelines: [{name: p, arrivals: {rate: "30"}}]
stages:
- {name: a, next: b, service: {mean: 50ms}, min: 3, max: 3}
- {name: b, service: {mean: 80ms, batchCost: 0.2}, batch: 4, slots: 2, min: 2, max: 2}
`)
	p := r.Policies[0]
	a, b := p.Stages[0], p.Stages[1]
	a.Utilisation.want(t, "busy share of a", 30*0.05/3, 0.03)
	if b.Utilisation.Mean < 0.3 || b.Utilisation.Mean > 0.8 || b.Service.Mean < 0.08 {
		t.Errorf("b: %+v, want batches of more than one, sometimes", b)
	}
	sum := a.Wait.Mean + a.Service.Mean + b.Wait.Mean + b.Service.Mean + 4*50e-6
	if got := p.Pipelines[0].Mean.Mean; math.Abs(got-sum) > 0.001*sum {
		t.Errorf("a request takes %g s, want the sum of its parts, %g s", got, sum)
	}
}
