package admin

import (
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/demand"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Demand knows what was learned about applications.
type Demand interface {
	// App returns what is known about an application, and whether anything is. fault is the reason
	// if a stored record could not be read that the application's earlier demand was in.
	App(key pipeline.Key) (app demand.App, known bool, fault string)
}

// serveDemand serves GET /system/demand/{name}.
func serveDemand(reg *provider.Registry, d Demand) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
		if _, ok := findPipeline(reg, key); !ok {
			http.Error(w, reg.NotFound("pipeline or function", key).Error(), http.StatusNotFound)
			return
		}
		app, known, fault := d.App(key)
		answerJSON(w, describeDemand(key, app, known, fault))
	})
}

func describeDemand(key pipeline.Key, app demand.App, known bool, fault string) schema.Demand {
	out := schema.Demand{App: key.String(), Notes: []string{}, Stages: []schema.DemandStage{}}
	if fault != "" {
		out.Notes = append(out.Notes, "what was learned before the last start of stagecoach could not be read, so it began empty: "+fault)
	}
	if !known {
		out.Notes = append(out.Notes, "nothing is known: no request for it has ended, or other applications were used later")
		return out
	}
	out.Last, out.Requests, out.Bytes = learnedAt(app.Last), app.Requests, app.Bytes
	for _, s := range app.Stages {
		st := schema.DemandStage{Name: s.Name, PerRequest: s.PerRequest, Work: described(app.Work(s.Name)), Lanes: []schema.DemandLane{}}
		if s.Length.Weight > 0 {
			st.Length = described(s.Length)
		}
		for _, l := range s.Lanes {
			st.Lanes = append(st.Lanes, schema.DemandLane{Function: l.Function, Batch: l.Batch, Given: l.Given, Returned: l.Returned, Work: described(l.Work), Last: learnedAt(l.Last)})
		}
		for _, n := range s.Next {
			next := schema.DemandNext{Stage: n.To, Probability: n.Probability, Factor: n.Factor, Variants: []schema.DemandFactor{}}
			for _, v := range n.Variants {
				next.Variants = append(next.Variants, schema.DemandFactor{Function: v.Function, Factor: v.Factor, Calls: v.Calls, Last: learnedAt(v.Last)})
			}
			st.Next = append(st.Next, next)
		}
		out.Stages = append(out.Stages, st)
	}
	return out
}

func described(d demand.Distribution) schema.DemandDistribution {
	out := schema.DemandDistribution{
		Calls: d.Weight, Mean: d.Mean, CV: d.CV, P50: d.Quantile(0.5), P95: d.Quantile(0.95), P99: d.Quantile(0.99),
		Buckets: make([]schema.DemandBucket, len(d.Buckets)),
	}
	for i, b := range d.Buckets {
		out.Buckets[i] = schema.DemandBucket{Value: b.Value, Share: b.Weight}
	}
	return out
}

// learnedAt returns a time as answers have it.
func learnedAt(t time.Time) time.Time { return t.UTC().Round(time.Millisecond) }
