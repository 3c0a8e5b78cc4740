package stage

import (
	"context"
	"io"
	"sync"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// maxChunk is the maximum size of a piece of a stream in one frame, in bytes.
const maxChunk = 64 << 10

func (s *server) chunk(ctx context.Context, batch uint64, i int, p []byte) error {
	for len(p) > 0 {
		n, err := s.credit.take(ctx, min(len(p), maxChunk))
		if err != nil {
			return err
		}
		m := wire.Chunk{Index: i, Data: p[:n]}
		if err := s.conn.Write(wire.Frame{Type: wire.FrameChunk, Batch: batch, Payload: m.Append(nil)}); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

// chunkCredit counts the bytes of chunks that the dispatcher accepts.
type chunkCredit struct {
	mu     sync.Mutex
	more   *sync.Cond
	left   uint64
	closed bool
}

func (c *chunkCredit) init() { c.more = sync.NewCond(&c.mu) }

func (c *chunkCredit) add(n uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.left += n
	c.more.Broadcast()
}

func (c *chunkCredit) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.more.Broadcast()
}

// take waits for credit and takes at most n bytes of it.
func (c *chunkCredit) take(ctx context.Context, n int) (int, error) {
	stop := context.AfterFunc(ctx, func() { c.mu.Lock(); defer c.mu.Unlock(); c.more.Broadcast() })
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if c.closed {
			return 0, io.ErrClosedPipe
		}
		if c.left > 0 {
			break
		}
		c.more.Wait()
	}
	n = int(min(uint64(n), c.left))
	c.left -= uint64(n)
	return n, nil
}
