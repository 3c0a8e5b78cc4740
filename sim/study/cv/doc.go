// Package cv trains the predictor of burstiness that autoscaler.Attention is, and compares it with Whitt's QNA and with persistence.
//
// A [Run] is a simulation whose smoother is looked at while it decides: what it knew of each station, and how bursty arrivals were
// measured to be there one window later. Training, validation and comparison have runs of their own, with seeds of their own; the
// comparison also has pipelines, CVs and loads of its own.
//
//	records, err := cv.Record(ctx, cv.TrainingRuns(), report)
//	w := cv.Train(records, validation, report)    // minutes, on one core; the same each time on one architecture
//	err = cv.WriteGo(file, w)                     // autoscaler/weights.go
//	table, err := cv.Compare(ctx, report)         // on runs that were held back
//
// `make train-cv` does all of it, `make bench-cv` the last step.
package cv
