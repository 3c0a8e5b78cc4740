// Command oci makes the OCI images of Stagecoach itself, without Docker:
//
//	go run ./scripts/oci build           # OCI layouts below build/oci: make images-oci
//	go run ./scripts/oci check           # builds them again elsewhere, and compares the digests
//	go run ./scripts/oci push REGISTRY   # pushes what build has made: make images-push
//	go run ./scripts/oci lock            # pins the present versions of the Debian packages
//
// The same sources, Go, C compiler and lock file give the same digests. docs/howto-images.md says
// what the images have.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "oci:", err)
		os.Exit(1)
	}
}

// run executes one command. It must run in the repository's root.
func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("oci", flag.ContinueOnError)
	folder := fs.String("out", "build/oci", "folder of the OCI layouts")
	cache := fs.String("debs", "build/debs", "folder of the Debian packages")
	tag := fs.String("tag", "", "with push: the tag; empty: the version that was built")
	insecure := fs.Bool("insecure", false, "with push: use HTTP if the registry has no TLS")
	if len(args) == 0 {
		return errors.New("want a command: build, check, push or lock")
	}
	command := args[0]
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	if want := map[string]int{"push": 1}[command]; fs.NArg() != want {
		return fmt.Errorf("%s takes %d arguments, got %q", command, want, fs.Args())
	}
	switch command {
	case "build":
		s, err := sourceOf(ctx, ".")
		if err != nil {
			return err
		}
		_, err = build(ctx, s, *cache, *folder, out)
		return err
	case "check":
		return check(ctx, *cache, *folder, out)
	case "push":
		return push(ctx, *folder, fs.Arg(0), *tag, *insecure, out)
	case "lock":
		return writeLock(ctx, lockFile)
	}
	return fmt.Errorf("command %q, want build, check, push or lock", command)
}
