//go:build !noevaluation

package main

import (
	"github.com/stagecoach-serving/stagecoach/autoscaler/baseline"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/sim/study/paper"
)

// init adds the evaluation to the product: the command `stagecoach sim paper`, and the allocators
// of other systems by name. Only this file imports the evaluation. A build with `-tags
// noevaluation` leaves it out, and does not need the folders sim/study and autoscaler/baseline.
func init() {
	evaluate = paper.Run
	policy.AddAllocator("hpa", baseline.NewHPA(baseline.HPAConfig{}))
	policy.AddAllocator("kpa", baseline.NewKPA(baseline.KPAConfig{}))
	policy.AddAllocator("infless", baseline.NewINFless(baseline.INFlessConfig{}))
	policy.AddAllocator("cocktail", baseline.NewCocktail(baseline.CocktailConfig{}))
}
