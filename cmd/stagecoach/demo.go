package main

import (
	"context"
	"errors"
	"io"
)

func runDemo(context.Context, []string, io.Writer) error { return errors.New("not yet") }
