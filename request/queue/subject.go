package queue

import (
	"fmt"
	"strconv"
	"strings"
)

// Token escapes a name for use as one token of a subject, as a stream's name or as a KV key.
// Letters, digits, '-' and '_' stay. Every other byte becomes "=XX" in hexadecimal. Token is
// injective; [Name] reverses it.
func Token(name string) string {
	return string(appendToken(make([]byte, 0, 64), name))
}

func appendToken(b []byte, name string) []byte {
	const digits = "0123456789ABCDEF"
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			b = append(b, c)
		default:
			b = append(b, '=', digits[c>>4], digits[c&15])
		}
	}
	return b
}

// Name reverses [Token].
func Name(token string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(token); i++ {
		if token[i] != '=' {
			b.WriteByte(token[i])
			continue
		}
		if i+3 > len(token) {
			return "", fmt.Errorf("token %q: cut off after %q, want two hexadecimal digits", token, token[i:])
		}
		c, err := strconv.ParseUint(token[i+1:i+3], 16, 8)
		if err != nil {
			return "", fmt.Errorf("token %q: %q at %d, want = and two hexadecimal digits", token, token[i:i+3], i)
		}
		b.WriteByte(byte(c))
		i += 2
	}
	return b.String(), nil
}

// taskSubject returns the subject for the tasks of a function.
func taskSubject(function string) string {
	return string(appendToken(append(make([]byte, 0, 64), "task."...), function))
}
