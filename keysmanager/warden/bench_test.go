package warden

import (
	"os"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// BenchmarkPut measures what a warden adds to each fork: it puts a description and two pipes, and
// drops them.
func BenchmarkPut(b *testing.B) {
	r, w, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for name, c := range map[string]*Client{"inside": InProcess(sandbox.NewSpawner()), "outside": outside(b)} {
		b.Run(name, func(b *testing.B) {
			if _, err := c.Attach(func(Exit) {}); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if err := c.Put("a", make([]byte, 300), r, r); err != nil {
					b.Fatal(err)
				}
				if err := c.Drop("a"); err != nil {
					b.Fatal(err)
				}
			}
		})
		c.Close()
	}
}

func outside(b *testing.B) *Client {
	b.Helper()
	c, err := Launch(b.Context(), launcher(b, time.Minute))
	if err != nil {
		b.Fatal(err)
	}
	return c
}
