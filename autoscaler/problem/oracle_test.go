package problem

import (
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// This file holds the policies against solvers that know nothing of them: a search through all
// counts, and Erlang's C by its definition. docs/decide.md describes the two problems.

// erlangC returns the probability that a call waits in M/M/c with an offered load of a < c, by its
// definition: (aᶜ/c!)·c/(c−a) / (Σ aᵏ/k! for k < c, plus the same).
func erlangC(c int, a float64) float64 {
	term, sum := 1.0, 0.0
	for k := range c {
		sum += term
		term *= a / float64(k+1)
	}
	waits := term * float64(c) / (float64(c) - a)
	return waits / (sum + waits)
}

// mmc returns the mean wait in M/M/c, in seconds.
func mmc(lambda, mean float64, c int) float64 {
	a := lambda * mean
	return erlangC(c, a) / (float64(c)/mean - lambda)
}

// TestErlangC checks the test's own formula with a value of Kleinrock's M/M/1 and the example in
// the comment of package autoscaler.
func TestErlangC(t *testing.T) {
	if got := erlangC(1, 0.6); math.Abs(got-0.6) > 1e-12 {
		t.Errorf("M/M/1: %v, want the load, 0.6", got)
	}
	if got := mmc(38, 0.2, 8) + 0.2; math.Abs(got-0.622) > 1e-3 {
		t.Errorf("38/s on 8 servers of 5/s: %v s, want 0.622 s", got)
	}
}

// TestSizerFindsTheFewestReplicas compares the sizer with a search through all counts of a chain of
// three stages. Of the time that the objective leaves, mean waits may take 1/ln 100, so that 99 %
// of exponential waits take all of it at most; but at least a tenth of the service time.
// Utilisations may be up to 0.98.
func TestSizerFindsTheFewestReplicas(t *testing.T) {
	text, err := os.ReadFile("testdata/chain.yml")
	if err != nil {
		t.Fatal(err)
	}
	means, most := []float64{0.03, 0.1, 0.02}, []int{6, 16, 5}
	feasible, total := 0, map[int]bool{}
	for _, rate := range []float64{1, 5, 20, 40, 80, 120} {
		for _, slo := range []float64{0.2, 0.3, 0.5, 1} {
			best := math.MaxInt
			var counts [3]int
			var search func(k int, wait float64, n int)
			limit := max((slo-0.15)/math.Log(100), 0.1*0.15)
			search = func(k int, wait float64, n int) {
				switch {
				case wait > limit || n >= best:
				case k == len(means):
					best = n
				default:
					for c := 1; c <= most[k]; c++ {
						if rate*means[k] <= 0.98*float64(c) {
							counts[k] = c
							search(k+1, wait+mmc(rate, means[k], c), n+c)
						}
					}
				}
			}
			search(0, 0, 0)
			if best == math.MaxInt {
				continue
			}
			feasible++
			total[best] = true
			d := decide(t, read(t, fmt.Sprintf(string(text), slo, rate)), policy.Names{Corrector: "none"}, 1)[0]
			wait := 0.0
			for i, name := range []string{"a", "b", "c"} {
				l := d.Functions[i]
				w := mmc(rate, means[i], l.Count)
				if wait += w; l.Function != name || math.Abs(l.Wait-w) > 1e-6 {
					t.Errorf("rate %g, objective %g s: %s with %d waits %v s, by Erlang's C %v s", rate, slo, l.Function, l.Count, l.Wait, w)
				}
			}
			if d.Used.Replicas != best || wait > limit+1e-9 {
				t.Errorf("rate %g, objective %g s: %d replicas that wait %.4g s, want %d and at most %.4g s", rate, slo, d.Used.Replicas, wait, best, limit)
			}
			if p := d.Pipelines[0]; math.Abs(p.Wait-wait) > 1e-6 || math.Abs(p.Service-0.15) > 1e-9 || p.Met == nil || !*p.Met {
				t.Errorf("rate %g, objective %g s: got %+v, want a wait of %v s", rate, slo, p, wait)
			}
		}
	}
	if feasible < 15 || len(total) < 8 {
		t.Errorf("%d problems with %d optima, want more, or the test says little", feasible, len(total))
	}
}

// TestGreedyMixFindsTheBestMix compares the greedy allocator of mixes with a search through all
// counts of two variants, for each budget. It is greedy, so it may miss the best mix, but not by
// much, and it must not claim a better one.
func TestGreedyMixFindsTheBestMix(t *testing.T) {
	text, err := os.ReadFile("testdata/variants.yml")
	if err != nil {
		t.Fatal(err)
	}
	const rate, accurate, cheap = 30.0, 0.2, 0.05 // per second; seconds
	limit := (1 - accurate) / math.Log(100)       // seconds for the mean wait of the accurate variant
	found := 0
	for budget := 4; budget <= 12; budget++ {
		best := 0.0
		for n := 1; n < budget; n++ {
			// the most calls that n accurate and the other cheap replicas serve in time
			if most(accurate, n, limit, rate)+most(cheap, budget-n, (1-cheap)/math.Log(100), rate) < rate {
				continue
			}
			x := most(accurate, n, limit, rate)
			best = max(best, (0.98*x+0.9*(rate-x))/rate)
		}
		p := read(t, fmt.Sprintf(string(text), budget))
		p.Policies.Allocator = "accuracy-greedy"
		d := decide(t, p, p.Policies, 1)[0]
		got := d.Pipelines[0]
		if best == 0 {
			t.Errorf("budget %d: no mix serves all, want a problem with one", budget)
		}
		if d.Used.Replicas > budget || got.Met == nil || !*got.Met || got.Accuracy > best+0.002 || got.Accuracy < best-0.02 {
			t.Errorf("budget %d: %d replicas, %+v; want an accuracy of %.4f", budget, d.Used.Replicas, got, best)
		}
		if math.Abs(got.Accuracy-best) <= 0.002 {
			found++
		}
	}
	if found < 8 {
		t.Errorf("the best mix of %d budgets, want 8 of 9", found)
	}
}

// most returns the largest rate, up to a bound, at which c servers keep the mean wait at a limit.
func most(mean float64, c int, limit, bound float64) float64 {
	low, high := 0.0, min(bound, 0.98*float64(c)/mean)
	if mmc(high, mean, c) <= limit {
		return high
	}
	for range 60 {
		if mid := (low + high) / 2; mmc(mid, mean, c) <= limit {
			low = mid
		} else {
			high = mid
		}
	}
	return low
}
