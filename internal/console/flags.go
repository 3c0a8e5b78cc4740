// Package console has what commands share: how they read flags, and how they print.
package console

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"strings"
)

// HelpAsked is the error of a command that got --help. Text is the help to print. The command has
// not failed.
type HelpAsked struct{ Text string }

// Error implements error.
func (HelpAsked) Error() string { return flag.ErrHelp.Error() }

// ParseMixed parses flags before, between and after arguments, and returns the arguments.
// Everything after -- is an argument.
func ParseMixed(fs *flag.FlagSet, args []string) ([]string, error) {
	var usage bytes.Buffer
	fs.SetOutput(&usage) // with an error it would bury the message
	var rest []string
	for {
		switch err := fs.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			return nil, HelpAsked{usage.String()}
		case err != nil:
			return nil, fmt.Errorf("%s: %w; `stagecoach %[1]s --help` lists the flags", fs.Name(), err)
		}
		left := fs.Args()
		if n := len(args) - len(left); len(left) == 0 || n > 0 && args[n-1] == "--" {
			return append(rest, left...), nil
		}
		rest, args = append(rest, left[0]), left[1:]
	}
}

// JSONFlag adds the flag --json, which all commands have that list or describe something.
func JSONFlag(fs *flag.FlagSet) *bool { return fs.Bool("json", false, "print JSON instead of a table") }

// ParseFlags parses the arguments of a command that takes flags alone.
func ParseFlags(fs *flag.FlagSet, args []string) error {
	rest, err := ParseMixed(fs, args)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%s: got argument %q, want flags alone", fs.Name(), rest[0])
	}
	return err
}

// OneName parses the arguments of a command that takes one name.
func OneName(fs *flag.FlagSet, args []string) (string, error) {
	rest, err := ParseMixed(fs, args)
	if err != nil {
		return "", err
	}
	if len(rest) != 1 || rest[0] == "" {
		return "", fmt.Errorf("%s: got %q, want one name", fs.Name(), rest)
	}
	return rest[0], nil
}

// Repeated is a flag that may be given several times.
type Repeated []string

// String implements [flag.Value].
func (r *Repeated) String() string { return strings.Join(*r, ", ") }

// Set implements [flag.Value].
func (r *Repeated) Set(s string) error { *r = append(*r, s); return nil }
