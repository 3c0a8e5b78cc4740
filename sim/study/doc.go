// Package study compares ways to size pipelines, on the simulator, so that nobody is favoured.
//
// A [Study] has settings (a model under a load), contenders (a policy with its start costs and its knobs), seeds and a budget of GPUs.
// [Study.Tune] tries as many configurations of every contender as of any other, on loads that are not those of the comparison, and
// chooses one a group of settings under the budget. [Study.Evaluate] runs what was chosen on the seeds of the comparison, and
// [Result.Compare] pairs runs of two contenders on the same seeds, which have the same arrivals and the same work.
//
//	tuned, err := s.Tune(ctx, open, report)       // minutes; kept as JSON
//	result, err := s.Evaluate(ctx, tuned, open, report)
//	c := result.Compare("ours", "kpa", "BERT-21B cv=4", "BERT-21B cv=8")
//	err = result.WriteMarkdown(os.Stdout)
//
// The package neither reads files nor the clock. Results depend on the study alone, not on how many processors there are.
package study
