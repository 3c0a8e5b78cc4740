package pipeline

import (
	"cmp"
	"strings"
)

// DefaultNamespace is where a function or pipeline without a namespace lives. It is OpenFaaS's.
const DefaultNamespace = "openfaas-fn"

// Key names a function or pipeline across namespaces. Old names may contain dots, namespaces may not. The zero Key names nothing.
type Key struct{ Name, Namespace string }

// Named returns the key of the function or pipeline that a user names. A namespace that the user gives beside the name always
// wins: then text is the name, dots included. Else the last dot of text begins the namespace, and without a dot it is
// [DefaultNamespace]. What is deployed makes no difference: the same words always mean the same function.
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

// ParseKey reads what [Key.String] wrote. A text without a dot is a name without a namespace, which nothing deployed has.
func ParseKey(text string) Key {
	if i := strings.LastIndexByte(text, '.'); i >= 0 {
		return Key{text[:i], text[i+1:]}
	}
	return Key{Name: text}
}

// String returns "name.namespace", the form in which keys are stored, sent and shown. [ParseKey] reads it.
func (k Key) String() string {
	if k.Namespace == "" && !strings.Contains(k.Name, ".") {
		return k.Name
	}
	return k.Name + "." + k.Namespace
}

// Short returns the shortest text that [Named] reads as k without a namespace beside it: the name alone in the default namespace.
func (k Key) Short() string {
	if Named(k.Name, "") == k {
		return k.Name
	}
	return k.String()
}

// Compare orders keys as their texts are ordered.
func (k Key) Compare(other Key) int { return cmp.Compare(k.String(), other.String()) }

// MarshalText writes [Key.String].
func (k Key) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (k *Key) UnmarshalText(text []byte) error {
	*k = ParseKey(string(text))
	return nil
}

// Key returns the function's key.
func (f Function) Key() Key { return Key{f.Name, f.Namespace} }

// Key returns the pipeline's key.
func (p Pipeline) Key() Key { return Key{p.Name, p.Namespace} }
