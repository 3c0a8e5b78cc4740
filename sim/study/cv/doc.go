// Package cv trains and compares predictors of how bursty arrivals at each stage will be:
// [Persistence], Whitt's [qna.Predict], and QUART's [Attention]. The measure of burstiness is the
// coefficient of variation (CV) of the times between arrivals. Ca² is its square.
//
// The product has no predictor: it uses the latest measurement, because no predictor is measurably
// better (docs/adr/0045, docs/adr/0076). For ablations, [NewCorrector] puts a predictor into the
// product's corrector.
//
// A [Run] is a simulation. Its decisions are recorded: what was known about each station, and how
// bursty its arrivals were one window later. Training, validation and comparison have separate runs
// and seeds. The comparison also has its own pipelines, CVs and loads.
//
//	records, err := cv.Record(ctx, cv.TrainingRuns(), report)
//	w := cv.Train(cv.Samples(records, cv.Whole), validation, report) // same arguments, same weights
//	source, err := cv.Go(w)                                          // weights.go
//	scores := cv.Compare(runs, records, cv.Contenders())             // runs that were held back
//
// `make train-cv` runs all of these steps. `make bench-cv` runs only the last one.
package cv
