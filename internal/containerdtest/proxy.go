package containerdtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
)

// Proxy is a containerd that answers late. It passes calls on to a Server, which works on a call
// even if its caller has given up.
type Proxy struct {
	Address string // of its unix socket

	ctx  context.Context // of the calls; ends with the test
	conn *grpc.ClientConn

	mu    sync.Mutex
	delay time.Duration
	held  []*Held
}

// Held is a call that a Proxy holds.
type Held struct {
	Came <-chan struct{} // closed when the call is held

	method string
	answer bool // its answer is held
	came   chan struct{}
	goOn   chan struct{}
	once   sync.Once
}

// Release lets the call, or its answer, pass.
func (h *Held) Release() { h.once.Do(func() { close(h.goOn) }) }

// Proxy starts a Proxy that ends with the test.
func (s *Server) Proxy() *Proxy {
	s.t.Helper()
	conn, err := grpc.NewClient("unix://"+s.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &Proxy{Address: filepath.Join(filepath.Dir(s.Address), "proxy.sock"), ctx: ctx, conn: conn}
	l, err := net.Listen("unix", p.Address)
	if err != nil {
		s.t.Fatal(err)
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(raw{}), grpc.UnknownServiceHandler(p.pass))
	end := make(chan error, 1)
	go func() { end <- server.Serve(l) }() // the end of the test waits for it
	s.t.Cleanup(func() {
		cancel()
		server.Stop()
		if err := errors.Join(<-end, conn.Close()); err != nil {
			s.t.Error(err)
		}
	})
	return p
}

// Delay makes each answer of containerd arrive later by d.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// HoldRequest holds the next call of a method, such as Tasks/Create, before containerd gets it.
func (p *Proxy) HoldRequest(method string) *Held { return p.hold(method, false) }

// HoldAnswer holds the answer to the next call of a method.
func (p *Proxy) HoldAnswer(method string) *Held { return p.hold(method, true) }

func (p *Proxy) hold(method string, answer bool) *Held {
	h := &Held{method: "." + method, answer: answer, came: make(chan struct{}), goOn: make(chan struct{})}
	h.Came = h.came
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = append(p.held, h)
	return h
}

// wait holds a call as long as the test wants.
func (p *Proxy) wait(method string, answer bool) {
	p.mu.Lock()
	var delay <-chan time.Time
	if answer && p.delay > 0 {
		delay = time.After(p.delay)
	}
	var goOn chan struct{}
	for i, h := range p.held {
		if h.answer == answer && strings.HasSuffix(method, h.method) {
			p.held = append(p.held[:i:i], p.held[i+1:]...)
			close(h.came)
			goOn = h.goOn
			break
		}
	}
	p.mu.Unlock()
	if goOn != nil {
		select {
		case <-goOn:
		case <-p.ctx.Done():
		}
	}
	if delay != nil {
		select {
		case <-delay:
		case <-p.ctx.Done():
		}
	}
}

// pass passes a call on.
func (p *Proxy) pass(_ any, caller grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(caller)
	headers, _ := metadata.FromIncomingContext(caller.Context())
	var first []byte // read now, because the caller may be killed while the call is held
	if err := caller.RecvMsg(&first); err != nil {
		return err
	}
	p.wait(method, false)
	server, err := p.conn.NewStream(metadata.NewOutgoingContext(p.ctx, headers.Copy()), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodecV2(raw{}))
	if err != nil {
		return err
	}
	go func() { // ends with the caller's stream
		for m := first; server.SendMsg(&m) == nil && caller.RecvMsg(&m) == nil; {
		}
		_ = server.CloseSend() // the answer says what is wrong
	}()
	for {
		var m []byte
		err := server.RecvMsg(&m)
		if errors.Is(err, io.EOF) {
			return nil
		}
		p.wait(method, true)
		if err != nil {
			return err
		}
		_ = caller.SendMsg(&m) // the caller may have given up
	}
}

// raw is a codec that leaves messages as they are.
type raw struct{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("a message of type %T, want bytes", v)
	}
	return mem.BufferSlice{mem.SliceBuffer(*b)}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("a message of type %T, want bytes", v)
	}
	*b = data.Materialize()
	return nil
}
