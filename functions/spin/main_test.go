package main

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestCostsComeFromTheEnvironment(t *testing.T) {
	env := map[string]string{"spin_base": "10ms", "spin_call": "3ms", "spin_byte": "1us", "spin_batch": "4"}
	c, err := parse(func(name string) string { return env[name] })
	if err != nil || c.batch != 4 {
		t.Fatalf("%+v, %v", c, err)
	}
	if got, want := c.of([]int{1000, 0}), 17*time.Millisecond; got != want {
		t.Errorf("a batch of 1000 bytes and none costs %v, want %v", got, want)
	}
	for name, v := range map[string]string{"spin_base": "2h", "spin_call": "-1ms", "spin_byte": "x", "spin_batch": "0"} {
		if _, err := parse(func(n string) string { return map[string]string{name: v}[n] }); err == nil {
			t.Errorf("%s=%q: no error", name, v)
		}
	}
}

// TestSpinUsesTheWantedTime checks that spin uses the wanted time of a core, and that it stops when
// its context ends.
func TestSpinUsesTheWantedTime(t *testing.T) {
	const d = 5 * time.Millisecond
	begin := time.Now()
	if err := spin(t.Context(), d); err != nil || time.Since(begin) < d {
		t.Errorf("%v after %v, want at least %v", err, time.Since(begin), d)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := spin(ctx, 5*time.Second); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", err)
	}
}
