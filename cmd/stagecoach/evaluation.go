//go:build !noevaluation

package main

import (
	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/policy"
)

// This file and sim_paper.go are all that the product has of its evaluation: `stagecoach sim paper`,
// and the allocators of others by name. A build with `-tags noevaluation` has neither, and needs none
// of the folders sim/study, autoscaler/baseline and bench/cv.
func init() {
	evaluate = simPaper
	policy.AddAllocator("hpa", baseline.NewHPA(baseline.HPAConfig{}))
	policy.AddAllocator("kpa", baseline.NewKPA(baseline.KPAConfig{}))
	policy.AddAllocator("infless", baseline.NewINFless(baseline.INFlessConfig{}))
	policy.AddAllocator("cocktail", baseline.NewCocktail(baseline.CocktailConfig{}))
}
