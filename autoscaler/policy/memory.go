package policy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// encodedPast is the JSON form of a past.
type encodedPast struct {
	Functions []string        `json:"functions"`
	Allocator json.RawMessage `json:"allocator,omitempty"`
	Corrector json.RawMessage `json:"corrector,omitempty"`
	Chosen    plan.Chosen     `json:"chosen,omitzero"`
	Tables    []plan.Table    `json:"tables,omitempty"`
	Tight     []tight         `json:"tight,omitempty"`
}

// MarshalJSON encodes each past once, sorted by its first function.
func (m Memory) MarshalJSON() ([]byte, error) {
	seen := map[*past]bool{}
	all := []encodedPast{}
	for _, p := range m {
		if seen[p] {
			continue
		}
		seen[p] = true
		e := encodedPast{Functions: p.functions, Chosen: p.chosen, Tables: p.tables, Tight: p.tight}
		for _, part := range []struct {
			from any
			to   *json.RawMessage
		}{{p.allocator, &e.Allocator}, {p.corrector, &e.Corrector}} {
			if part.from == nil {
				continue
			}
			var err error
			if *part.to, err = json.Marshal(part.from); err != nil {
				return nil, fmt.Errorf("policy: memory of %q: %w", p.functions, err)
			}
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b encodedPast) int { return cmp.Compare(a.Functions[0], b.Functions[0]) })
	return json.Marshal(all)
}

// DecodeMemory decodes the result of [Memory.MarshalJSON] for these policies.
func (s Set) DecodeMemory(data []byte) (Memory, error) {
	var all []encodedPast
	if err := json.Unmarshal(data, &all); err != nil {
		return nil, fmt.Errorf("policy: memory: %w", err)
	}
	m := Memory{}
	for i, e := range all {
		if len(e.Functions) == 0 {
			return nil, fmt.Errorf("policy: memory %d belongs to no function", i)
		}
		p := &past{functions: e.Functions, chosen: e.Chosen, tables: e.Tables, tight: e.Tight}
		for _, part := range []struct {
			from  json.RawMessage
			to    *any
			level level
		}{{e.Allocator, &p.allocator, s.allocatorOf(e.Chosen)}, {e.Corrector, &p.corrector, s.corrector}} {
			if len(part.from) == 0 || part.level == nil {
				continue
			}
			var err error
			if *part.to, err = part.level.decode(part.from); err != nil {
				return nil, fmt.Errorf("policy: memory of %q: %w", e.Functions, err)
			}
		}
		for _, f := range e.Functions {
			m[f] = p
		}
	}
	return m, nil
}
