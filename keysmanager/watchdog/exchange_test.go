package watchdog

import (
	"bufio"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestBodyAfterTheAnswer checks a function that answers without reading its input, which the
// gateway sends later.
func TestBodyAfterTheAnswer(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "gateway"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	raw, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	gateway, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer gateway.Close()
	_ = gateway.SetDeadline(time.Now().Add(soon))
	spawner := sandbox.NewSpawner()
	defer spawner.Close()
	log := slog.New(slog.DiscardHandler)
	e := newExchanges(&forker{c: shell(modeStreaming, "echo done"), runtime: spawner, log: log}, 1, 0, 0)
	defer e.close(t.Context())
	defer gateway.Close() // must run before the test waits for the server
	var served sync.WaitGroup
	defer served.Wait()
	served.Go(func() { e.serve(t.Context(), raw, &hop.Pool{}) })

	if _, err := io.WriteString(gateway, "POST / HTTP/1.1\r\nHost: f\r\nContent-Length: 1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	in := bufio.NewReader(gateway)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != "done\n" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("after the answer: %v, want its end", err)
	}
	if _, err := io.WriteString(gateway, "x"); err != nil {
		t.Errorf("the body, after the answer: %v", err)
	}
}
