package pipeline

import (
	"cmp"
	"strings"
)

// DefaultNamespace is the namespace of a function or pipeline that names none. It is OpenFaaS's.
const DefaultNamespace = "openfaas-fn"

// Key names a function or pipeline across namespaces. Old names may contain dots; namespaces may
// not. The zero Key names nothing.
type Key struct{ Name, Namespace string }

// Named returns the key of the function or pipeline that a user names. If the user gives a
// namespace separately, text is the name, dots included. Otherwise the last dot of text begins the
// namespace, and without a dot the namespace is [DefaultNamespace]. The result does not depend on
// what is deployed.
func Named(text, namespace string) Key {
	switch {
	case namespace != "":
		return Key{text, namespace}
	case strings.Contains(text, "."):
		return ParseKey(text)
	default:
		return Key{text, DefaultNamespace}
	}
}

// ParseKey parses what [Key.String] returned. A text without a dot is a name without a namespace,
// which no deployed function has.
func ParseKey(text string) Key {
	if i := strings.LastIndexByte(text, '.'); i >= 0 {
		return Key{text[:i], text[i+1:]}
	}
	return Key{Name: text}
}

// String returns "name.namespace", the form in which keys are stored, sent and shown. [ParseKey]
// reads it.
func (k Key) String() string {
	if k.Namespace == "" && !strings.Contains(k.Name, ".") {
		return k.Name
	}
	return k.Name + "." + k.Namespace
}

// Short returns the shortest text that [Named] turns into k without a separate namespace. In the
// default namespace, it is the name alone.
func (k Key) Short() string {
	if Named(k.Name, "") == k {
		return k.Name
	}
	return k.String()
}

// Compare orders keys as their texts are ordered.
func (k Key) Compare(other Key) int { return cmp.Compare(k.String(), other.String()) }

// MarshalText returns [Key.String] as bytes.
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText parses the result of MarshalText.
func (k *Key) UnmarshalText(text []byte) error {
	*k = ParseKey(string(text))
	return nil
}

// Key returns the function's key.
func (f Function) Key() Key { return Key{f.Name, f.Namespace} }

// Key returns the pipeline's key.
func (p Pipeline) Key() Key { return Key{p.Name, p.Namespace} }
