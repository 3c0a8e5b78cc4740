// Package rate estimates the rate and the burstiness of arrivals, and finds the times at which the
// rate changed.
//
// Arrivals are taken for a renewal process with gamma gaps, as everywhere in the autoscaler. Let n
// arrivals come in t seconds, m of them in the last u seconds, and let Ca² be the squared CV of the
// gaps. The most likely rate is n/t. The logarithm of its likelihood is n·ln(n/t)/Ca², up to terms
// that do not depend on the rate. The evidence that the rate changed u seconds ago is
//
//	(m·ln(m/u) + (n−m)·ln((n−m)/(t−u)) − n·ln(n/t)) / Ca²
//
// This is the generalised likelihood ratio (Siegmund and Venkatraman, Using the Generalized
// Likelihood Ratio Statistic for Sequential Detection of a Change-Point, 1995). CUSUM is the same
// for known rates before and after the change. An [Estimator] computes it for about forty times u
// between a second and some minutes.
//
//   - If the evidence for a change exceeds [Certain], all arrivals before it are forgotten.
//   - Until then, the rate is a mean of the rates since all possible changes, weighted by the
//     likelihood of each change. So a rate that may have changed moves towards the new rate as the
//     evidence grows, and moves back if it was chance.
//
// docs/rates.md compares this with the rule that was used before.
package rate
