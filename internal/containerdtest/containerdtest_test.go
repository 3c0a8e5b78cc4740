package containerdtest

import (
	"context"
	"testing"
)

func TestServersAnswerAfterAKill(t *testing.T) {
	s := Start(t)
	c := s.Client("test")
	v, err := c.Version(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("containerd %s", v.Version)
	s.Kill()
	s.Run()
	if _, err := c.Version(context.Background()); err != nil {
		t.Fatal(err)
	}
}
