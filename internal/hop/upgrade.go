package hop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"
)

// upgrade passes on an answer with status 101 and then all bytes in both directions, until one side
// or ctx ends.
func (r *Request) upgrade(ctx context.Context, c net.Conn, in *bufio.Reader, w http.ResponseWriter, resp *http.Response) (begun bool, err error) {
	want, got := upgradeTo(r.In.Header), upgradeTo(resp.Header)
	if want == "" || !strings.EqualFold(want, got) || !printable(got, ' ') {
		return false, fmt.Errorf("it switches to protocol %.100q, want %.100q", got, want)
	}
	also := named(resp.Header)
	if r.Answer != nil {
		r.Answer(resp)
	}
	client, both, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return false, err
	}
	defer client.Close()
	defer context.AfterFunc(ctx, func() { _ = client.Close() })()
	h := w.Header().Clone()
	for name, values := range resp.Header {
		if !hopByHop(name) && name != "Content-Length" && !slices.Contains(also, name) {
			h[name] = append(h[name], values...)
		}
	}
	h["Connection"], h["Upgrade"] = []string{"Upgrade"}, []string{got}
	fmt.Fprintf(both, "HTTP/1.1 %s\r\n", resp.Status)
	_ = h.Write(both) // after the status line
	_, _ = both.WriteString("\r\n")
	if err := both.Flush(); err != nil {
		return true, err
	}
	closeBoth := func() { _, _ = c.Close(), client.Close() }
	var silent *time.Timer
	if r.Silence > 0 {
		silent = time.AfterFunc(r.Silence, closeBoth)
		defer silent.Stop()
	}
	ends := make(chan error, 2)
	way := func(to net.Conn, from io.Reader) {
		ends <- r.oneWay(to, from, silent)
	}
	// The function waits for both goroutines, which end with their connections.
	go way(c, both.Reader)
	go way(client, in)
	for range cap(ends) {
		if err := <-ends; err != nil { // otherwise the other direction goes on until it ends
			closeBoth()
		}
	}
	return true, nil
}

// oneWay copies one direction. It returns nil if that direction has ended and the other side was
// told.
func (r *Request) oneWay(to net.Conn, from io.Reader, silent *time.Timer) error {
	b := heads.Get().(*buffer)
	defer b.give()
	for {
		n, err := from.Read(b.b[:cap(b.b)])
		if n > 0 {
			if silent != nil {
				silent.Reset(r.Silence)
			}
			if _, err := to.Write(b.b[:n]); err != nil {
				return err
			}
		}
		if half, ok := to.(interface{ CloseWrite() error }); ok && errors.Is(err, io.EOF) {
			return half.CloseWrite()
		}
		if err != nil {
			return err
		}
	}
}
