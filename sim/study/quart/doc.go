// Package quart is the evaluation of QUART (ICDCS'24, section 8) on the simulator: its five models, its cluster, its loads and public
// traces, ours against tuned opponents, ours without each of its parts, and what becomes of the paper's claims.
//
//	s := quart.Full(open)            // everything
//	s := quart.Quick()               // seconds: one model, two loads, three contenders
//	result, err := s.Evaluate(ctx, tuned, open, report)
//
// Constants have their source beside them and are not read from files, so that who has none can run it. Only traces are read, through
// an opener; without one their settings are left out. docs/adr/0044-quart-physics.md says what differs from the paper's testbed.
package quart
