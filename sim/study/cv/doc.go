// Package cv trains and compares predictors of how bursty arrivals at each stage will be:
// [Persistence], Whitt's [qna.Predict], and QUART's [Attention]. The product has none of them: it
// takes arrivals for as bursty as they were measured last, which no predictor measurably improves
// on (docs/adr/0045, docs/adr/0076). [NewCorrector] puts a predictor into the product's corrector,
// for ablations.
//
// A [Run] is a simulation whose smoother is watched while it decides: what was known of each
// station, and how bursty arrivals were measured to be there one window later. Training, validation
// and comparison have runs and seeds of their own. The comparison also has pipelines, CVs and loads
// of its own.
//
//	records, err := cv.Record(ctx, cv.TrainingRuns(), report)
//	w := cv.Train(cv.Samples(records, cv.Whole), validation, report) // same arguments, same weights
//	source, err := cv.Go(w)                                          // weights.go
//	scores := cv.Compare(runs, records, cv.Contenders())             // runs that were held back
//
// `make train-cv` does all of it, `make bench-cv` the last step.
package cv
