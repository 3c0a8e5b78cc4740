package stack

import (
	"fmt"
	"regexp"
	"strings"
)

var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*`)

// maxDepth bounds nested defaults.
const maxDepth = 8

// substitute replaces ${NAME} and ${NAME:-default} (also written := or =) by the variable's value.
// If the variable is unset or empty, the default applies. A default may contain further variables.
// $$ becomes one $. A $ before anything else stays.
func substitute(name, text string, lookup func(string) (string, bool)) (string, error) {
	s := substitution{name: name, text: text, lookup: lookup}
	return s.until("", 0)
}

type substitution struct {
	name   string
	text   string
	at     int
	lookup func(string) (string, bool)
}

// until copies the text up to the end mark and skips the mark; "" means the end of the text.
func (s *substitution) until(end string, depth int) (string, error) {
	begin := s.at
	var out strings.Builder
	for s.at < len(s.text) {
		rest := s.text[s.at:]
		switch {
		case end != "" && strings.HasPrefix(rest, end):
			s.at += len(end)
			return out.String(), nil
		case strings.HasPrefix(rest, "$$"):
			out.WriteByte('$')
			s.at += 2
		case strings.HasPrefix(rest, "${"):
			v, err := s.variable(depth)
			if err != nil {
				return "", err
			}
			out.WriteString(v)
		default:
			out.WriteByte(rest[0])
			s.at++
		}
		if out.Len() > MaxSize {
			return "", fmt.Errorf("%s: more than %d bytes after substitution", s.name, MaxSize)
		}
	}
	if end != "" {
		return "", s.bad(begin, "no } after ${")
	}
	return out.String(), nil
}

// variable reads the rest of a variable, after ${.
func (s *substitution) variable(depth int) (string, error) {
	begin := s.at
	if depth >= maxDepth {
		return "", s.bad(begin, fmt.Sprintf("more than %d defaults within each other", maxDepth))
	}
	s.at += 2
	name := variable.FindString(s.text[s.at:])
	if name == "" {
		return "", s.bad(begin, "no name after ${")
	}
	s.at += len(name)
	value, _ := s.lookup(name)
	for _, op := range []string{"}", ":-", ":=", "="} {
		if !strings.HasPrefix(s.text[s.at:], op) {
			continue
		}
		s.at += len(op)
		if op == "}" {
			return value, nil
		}
		def, err := s.until("}", depth+1)
		if err != nil || value != "" {
			return value, err
		}
		return def, nil
	}
	return "", s.bad(begin, "unknown operation on "+name)
}

func (s *substitution) bad(at int, what string) error {
	line, _, _ := strings.Cut(s.text[at:], "\n")
	return fmt.Errorf("%s:%d: %s in %.40q, want ${NAME} or ${NAME:-default}; $$ is a $ itself",
		s.name, 1+strings.Count(s.text[:at], "\n"), what, line)
}
