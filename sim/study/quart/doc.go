// Package quart repeats the evaluation of QUART (ICDCS'24, section 8) on the simulator, with the
// paper's five models, its cluster and its loads, and with public traces. It compares Stagecoach
// ("ours") with tuned opponents, and with variants of Stagecoach that lack one part. It judges the
// paper's claims.
//
//	s, err := quart.Headline(open)   // what is reported first, in minutes
//	s, err := quart.Full(open)       // everything, with sweeps
//	s := quart.Quick()               // seconds: one model, two loads, a few contenders
//	result, err := s.Evaluate(ctx, tuned, open, report)
//
// Constants are in the code, with their sources beside them, so the evaluation runs without any
// data. Only traces are read, through the opener. Settings with missing traces are left out.
// docs/adr/0044-quart-physics.md says what differs from the paper's testbed.
package quart
