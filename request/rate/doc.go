// Package rate estimates the rate and the burstiness of arrivals, and finds the times at which the
// rate changed.
//
// Arrivals are taken for a renewal process with gamma gaps, as everywhere in the autoscaler. For
// such arrivals, the number n within a time t is all that matters for their rate. The logarithm of
// the likelihood is n·ln(n/t)/Ca² at the best rate n/t, up to terms that do not depend on the rate.
// Ca² is the squared CV of the gaps. Assume that the rate changed a time u ago, and that m arrivals
// came since. The evidence for that change is
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
