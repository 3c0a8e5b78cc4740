package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
)

// helpAsked is what a command's --help prints: no failure.
type helpAsked struct{ text string }

func (helpAsked) Error() string { return flag.ErrHelp.Error() }

// parseMixed parses flags before, between and after arguments, and returns the arguments. What follows -- is arguments.
func parseMixed(fs *flag.FlagSet, args []string) ([]string, error) {
	var usage bytes.Buffer
	fs.SetOutput(&usage) // with an error it would bury the message
	var rest []string
	for {
		switch err := fs.Parse(args); {
		case errors.Is(err, flag.ErrHelp):
			return nil, helpAsked{usage.String()}
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

// jsonFlag is of all commands that list or describe something.
func jsonFlag(fs *flag.FlagSet) *bool { return fs.Bool("json", false, "print JSON instead of a table") }

// parseFlags parses the arguments of a command that takes flags alone.
func parseFlags(fs *flag.FlagSet, args []string) error {
	rest, err := parseMixed(fs, args)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%s: got argument %q, want flags alone", fs.Name(), rest[0])
	}
	return err
}
