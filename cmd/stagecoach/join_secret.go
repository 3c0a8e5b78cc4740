package main

import (
	"context"
	"fmt"
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
	keepAgain = 2 * time.Second // after an error; the time doubles with each error, up to keepEvery
)

// rotation replaces the token each day. Kubelets renew the files of a Secret that pods mount within
// two minutes.
var rotation = authority.Rotation{Every: 24 * time.Hour, Overlap: 10 * time.Minute}

// joinSecret keeps a join token in a Secret of Kubernetes. Pods of nodes mount the Secret, so a pod
// on a new machine can join without an operator.
type joinSecret struct {
	secret    kube.Secret
	client    *kube.Client
	authority *authority.Authority
	log       *slog.Logger

	// Only run uses these fields.
	made   string        // text of a token that was made and not written yet
	again  time.Duration // until the next attempt after an error; 0: the latest attempt was good
	logged time.Time     // when an error was logged
}

// openJoinSecret returns what keeps the token in the configured Secret; nil: no Secret is
// configured. It fails outside of a pod.
func openJoinSecret(c ClusterConfig, log *slog.Logger) (*joinSecret, error) {
	if c.JoinSecret == "" {
		return nil, nil
	}
	secret, err := kube.ParseSecret(c.JoinSecret)
	if err != nil {
		return nil, err
	}
	client, err := kube.InPod()
	if err != nil {
		return nil, fmt.Errorf("cluster.joinSecret: %w", err)
	}
	return &joinSecret{secret: secret, client: client, log: log}, nil
}

// start keeps the token in the Secret until stop is called. Only the leader does this.
func (j *joinSecret) start(a *authority.Authority) (stop func()) {
	if j == nil {
		return func() {}
	}
	j.authority, j.made, j.again, j.logged = a, "", 0, time.Time{}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { j.run(ctx) })
	return func() { cancel(); running.Wait() }
}

// run keeps the token in the Secret until ctx ends.
func (j *joinSecret) run(ctx context.Context) {
	for {
		err := j.keep(ctx)
		if ctx.Err() != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(j.next(err, time.Now())):
		}
	}
}

// next logs the result of an attempt, and returns the time until the next one. Errors may differ
// each time, by their ports, so they are logged at most once per keepEvery.
func (j *joinSecret) next(err error, now time.Time) time.Duration {
	if err == nil {
		if j.again > 0 {
			j.log.Info("the join token is in its Secret again", "secret", j.secret.String())
		}
		j.again, j.logged = 0, time.Time{}
		return keepEvery
	}
	if now.Sub(j.logged) >= keepEvery {
		j.logged = now
		j.log.Error("the join token is not in its Secret: pods on new machines cannot join; retrying", "secret", j.secret.String(), "error", err)
	}
	j.again = min(max(2*j.again, keepAgain), keepEvery)
	return j.again
}

// keep writes a new token if the Secret does not have the standing token, or if that is old. The
// Secret lacks the token at the first start, and after someone has changed the Secret or has
// revoked the token. If a token was made and could not be written, the next call writes it.
func (j *joinSecret) keep(ctx context.Context) error {
	have, err := j.client.Value(ctx, j.secret, joinKey)
	if err != nil {
		return err
	}
	text := string(have)
	if j.made != "" {
		text = j.made
	}
	t, made, err := j.authority.StandingToken(text, rotation)
	if err != nil {
		return err
	}
	if made {
		j.made = t.String()
	}
	if string(have) == t.String() {
		j.made = ""
		return nil
	}
	if err := j.client.SetValue(ctx, j.secret, joinKey, []byte(t.String())); err != nil {
		return err
	}
	j.made = ""
	j.log.Info("join token written", "secret", j.secret.String(), "token", t.ID())
	return nil
}
