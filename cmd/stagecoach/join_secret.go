package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
)

// joinKey is the key of the join token in a Secret of Kubernetes.
const joinKey = "token"

// Times of joinSecret.run.
const (
	keepEvery = time.Minute
	keepAgain = 2 * time.Second // after an error
)

// joinSecret keeps a join token in a Secret of Kubernetes. Pods of nodes mount the Secret, so a pod
// on a new machine can join without an operator.
type joinSecret struct {
	secret    kube.Secret
	client    *kube.Client
	authority *authority.Authority
	log       *slog.Logger
	logged    string // the latest logged error; only run uses it
}

// keepJoinSecret keeps the token in the configured Secret until stop is called. Only the leader
// does this.
func keepJoinSecret(u *up) (stop func(), err error) {
	if u.cfg.Cluster.JoinSecret == "" {
		return func() {}, nil
	}
	secret, err := kube.ParseSecret(u.cfg.Cluster.JoinSecret)
	if err != nil {
		return nil, err
	}
	client, err := kube.InPod()
	if err != nil {
		return nil, err
	}
	j := &joinSecret{secret: secret, client: client, authority: u.nodes.authority, log: u.log}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { j.run(ctx) })
	return func() { cancel(); running.Wait() }, nil
}

// run keeps the token in the Secret until ctx ends.
func (j *joinSecret) run(ctx context.Context) {
	for {
		wait, cause := keepEvery, ""
		if err := j.keep(ctx); err != nil {
			wait, cause = keepAgain, err.Error()
		}
		if cause != j.logged && cause != "" && ctx.Err() == nil {
			j.log.Error("the join token is not in its Secret: pods on new machines cannot join; it is tried again", "secret", j.secret.String(), "error", cause)
		}
		j.logged = cause
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// keep writes a new token if the Secret does not have the standing token. That happens at the first
// start, and after someone has changed the Secret or has made its token void.
func (j *joinSecret) keep(ctx context.Context) error {
	have, err := j.client.Value(ctx, j.secret, joinKey)
	if err != nil {
		return err
	}
	t, made, err := j.authority.StandingToken(string(have))
	if err != nil || !made {
		return err
	}
	if err := j.client.SetValue(ctx, j.secret, joinKey, []byte(t.String())); err != nil {
		return err
	}
	j.log.Info("join token written", "secret", j.secret.String(), "token", t.ID())
	return nil
}
