// Package accuracy decides how many replicas of which variants of a pipeline's stages run, with
// which batch, and which part of the requests goes along which chain of variants. It serves as many
// requests as possible in time, then answers as accurately as possible, then uses as few replicas
// as possible, and then changes as little as possible.
//
// [Problem.Solve] finds the best plan by branch and bound, and proves that it is the best.
// [MostAccurateFirst] makes routing tables from replicas and demand, between two plans.
//
// The problem is Loki's (Ahmad, Guan and Sitaraman, HPDC 2024), with its formulas corrected. The
// package is pure: it has no clock and draws no chance, so decisions can be made again.
package accuracy
