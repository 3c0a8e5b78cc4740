// Package problem makes one decision about a cluster that a file describes: a Problem is read into
// a [plan.Snapshot], the policies decide on it, and the decision is valued with the queueing model.
//
//	p, err := problem.Read(file)
//	decisions, err := p.Decide(p.Policies, 1, clock)
//
// So anyone can hold a policy of Stagecoach against a solver of their own. docs/decide.md describes
// the file, and docs/schema/decide.schema.json is its JSON schema.
package problem
