package flow

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// wanted returns the pins that a request's header asks for, parallel to the stages. The pin of a
// stage that the header does not name is empty. Without the header, wanted returns nil.
func wanted(req *task.Request, g *pipeline.Pipeline) ([]task.Pin, *task.Error) {
	var names []string
	for i := range req.Header {
		if req.Header[i].Name == task.HeaderVariants {
			names = append(names, strings.Split(req.Header[i].Value, ",")...)
		}
	}
	if names == nil {
		return nil, nil
	}
	pins := make([]task.Pin, len(g.Stages))
	for _, name := range names {
		name = strings.TrimSpace(name)
		i := slices.IndexFunc(g.Stages, func(s pipeline.Stage) bool { return serves(&s, name) })
		if i < 0 {
			return nil, badVariant(name, fmt.Sprintf("a function that serves a stage of %q: one of %s", g.Name, strings.Join(served(g), ", ")))
		}
		key := pipeline.Key{Name: name, Namespace: g.Stages[i].Namespace}.String()
		if pins[i].Function != "" && pins[i].Function != key {
			return nil, badVariant(name, fmt.Sprintf("one function per stage; %s is for stage %q, too", pins[i].Function, g.Stages[i].Name))
		}
		pins[i].Function = key
	}
	return pins, nil
}

// serves reports whether a function serves a stage.
func serves(s *pipeline.Stage, function string) bool {
	return function == s.Name && !s.Retained || slices.ContainsFunc(s.Variants, func(v pipeline.Function) bool { return v.Name == function })
}

// served returns the functions that serve the stages of a graph.
func served(g *pipeline.Pipeline) (out []string) {
	for i := range g.Stages {
		s := &g.Stages[i]
		if !s.Retained {
			out = append(out, s.Name)
		}
		for k := range s.Variants {
			out = append(out, s.Variants[k].Name)
		}
	}
	return out
}

func badVariant(name, want string) *task.Error {
	return &task.Error{Status: http.StatusBadRequest, Cause: fmt.Sprintf("header %s: got %.200q, want %s", task.HeaderVariants, name, want)}
}
