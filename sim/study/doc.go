// Package study compares ways to size pipelines on the simulator, without favouring any of them.
//
// A [Study] has:
//
//   - settings: a model under a load
//   - contenders: a policy with its start costs, and its configuration as a list of knobs
//   - "ours": the contender with which the others are compared
//   - seeds
//   - a budget of GPUs, and a number of cores per replica that all contenders with equal means have
//
// [Study.Tune] tries equally many configurations of every contender, on other loads than those of
// the comparison. For each contender and group of settings, it chooses a configuration that fits
// the budget. [Study.Evaluate] runs the chosen configurations on the seeds of the comparison.
// [Result.Compare] compares two contenders by pairs of runs with equal seeds, which have equal
// arrivals and equal work.
//
//	tuned, err := s.Tune(ctx, open, report)       // minutes; kept as JSON
//	result, err := s.Evaluate(ctx, tuned, open, report)
//	c := result.Compare("ours", "kpa", "BERT-21B cv=4", "BERT-21B cv=8")
//	err = result.WriteMarkdown(os.Stdout)
//
// [Study.More] has settings with other seeds or contenders, such as sweeps. With a [Store], a study
// that was stopped goes on where it was.
//
// Except for a Store, the package neither reads files nor looks at the clock. Results depend only
// on the study, not on the number of processors.
package study
