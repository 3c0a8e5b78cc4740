package admin

import (
	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// explainModel describes the model's terms. batch is the function's largest batch.
func explainModel(t *autoscaler.Terms, batch int) schema.ExplainedModel {
	out := schema.ExplainedModel{Batch: max(batch, 1), NoPrediction: t.NoStay, Bounded: t.Bounded}
	if t.Batch > 0 {
		out.BatchTime = rounded(t.Batch)
	}
	if t.Load > 0 {
		out.Load = finite(t.Load)
	}
	if t.Stay > 0 {
		out.Predicted = rounded(t.Stay)
	}
	if t.Stayed > 0 {
		out.Stayed = rounded(t.Stayed)
	}
	if part, ok := t.Error(); ok {
		out.Error = finite(part)
	}
	return out
}

// lastMinute describes a comparison over the last minute. It returns nil if e is zero, because the
// minute cannot be judged.
func lastMinute(e autoscaler.ModelError) *schema.ExplainedError {
	if e.Tasks == 0 {
		return nil
	}
	return &schema.ExplainedError{Tasks: e.Tasks, Predicted: rounded(e.Predicted), Stayed: rounded(e.Stayed), Error: e.Ratio() - 1, Off: e.Off}
}

// off adds a note if the model's prediction for a stage or variant is far off.
func (x *draft) off(st draftStage) {
	if e := st.LastMinute; e != nil && e.Off {
		x.add("%s: the model is off by %+.0f %%: its tasks of the last minute stayed for %s on average, the prediction was %s; "+
			"docs/model.md says for which arrivals it holds", st.Name, 100*e.Error, e.Stayed, e.Predicted)
	}
}
