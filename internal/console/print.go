package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// Progress prints a line to standard error. Standard output gets nothing but results.
func Progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// WriteJSON writes a value as indented JSON.
func WriteJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(v)
}

// WriteFile makes a file, or empties it, and has write fill it.
func WriteFile(name string, write func(io.Writer) error) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}
