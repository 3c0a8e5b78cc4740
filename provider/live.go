package provider

import (
	"bytes"
	"encoding/json"
	"maps"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// liveAnnotations are the annotations that only policies and the request path read. Replicas do not
// see them, so a deploy that changes no more keeps the replicas.
var liveAnnotations = []string{"accuracy", "allocator", "batch", "batch-wait", "length", "max-length", "min-accuracy", "rank", "retry-dropped", "route", "weight"}

// keepsReplicas reports whether a deploy changes live annotations and nothing else. A deploy that
// changes nothing at all replaces the replicas, as operators expect of a second deploy.
func keepsReplicas(old, next *Deployed) bool {
	was, is := deref(old.Deployment.Annotations), deref(next.Deployment.Annotations)
	changed := false
	for _, name := range liveAnnotations {
		a, before := was[pipeline.Prefix+name]
		b, now := is[pipeline.Prefix+name]
		changed = changed || before != now || a != b
	}
	return changed && bytes.Equal(withoutLive(old), withoutLive(next))
}

// withoutLive returns the stored form of a deployment without its live annotations and without what
// does not concern replicas.
func withoutLive(d *Deployed) []byte {
	s := stored{Deployment: d.Deployment, Digest: d.Digest, Guess: d.Guess}
	rest := maps.Clone(deref(d.Deployment.Annotations))
	for _, name := range liveAnnotations {
		delete(rest, pipeline.Prefix+name)
	}
	if s.Deployment.Annotations = &rest; len(rest) == 0 {
		s.Deployment.Annotations = nil
	}
	b, err := json.Marshal(s)
	if err != nil {
		return nil // encode refuses such a deployment
	}
	return b
}
