// Package quart is the evaluation of QUART (ICDCS'24, section 8) on the simulator. It has the
// paper's five models, cluster, loads and public traces. It compares ours with tuned opponents and
// with ours without each of its parts, and judges the paper's claims.
//
//	s := quart.Full(open)            // everything
//	s := quart.Quick()               // seconds: one model, two loads, three contenders
//	result, err := s.Evaluate(ctx, tuned, open, report)
//
// Constants have their source beside them. They are not read from files, so the evaluation runs
// without any data. Only traces are read, through an opener. Without an opener their settings are
// left out. docs/adr/0044-quart-physics.md says what differs from the paper's testbed.
package quart
