package flow

import (
	"net/http"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestRequestThatWouldBeLateIsRefused(t *testing.T) {
	g := graph(t, "a>b;b")
	second := task.Load{Servers: 2, Max: 2, Limit: 100, Service: time.Second}
	for name, tc := range map[string]struct {
		a, b   task.Load
		left   time.Duration
		status int
		retry  time.Duration
	}{
		"nothing known":            {task.Load{Limit: 10}, task.Load{Limit: 10}, time.Millisecond, 0, 0},
		"in time":                  {second, second, 3 * time.Second, 0, 0},
		"service alone is late":    {second, second, time.Second, 429, time.Second},
		"the line is too long":     {second, task.Load{Servers: 2, Max: 2, Limit: 100, Service: time.Second, Waiting: 18, Running: 2}, 5 * time.Second, 429, 7 * time.Second},
		"it can be scaled in time": {second, task.Load{Servers: 2, Max: 20, Limit: 100, Service: time.Second, Waiting: 18, Running: 2}, 5 * time.Second, 0, 0},
		"the line is full":         {second, task.Load{Servers: 1, Max: 9, Limit: 100, Service: time.Millisecond, Waiting: 100}, time.Minute, 429, time.Second},
		"a start takes too long":   {task.Load{Max: 5, Limit: 10, Start: 4 * time.Second}, second, 3 * time.Second, 429, 2 * time.Second},
		"too late already":         {second, second, 0, 504, 0},
		"starts overlap":           {task.Load{Max: 5, Limit: 10, Start: 4 * time.Second}, task.Load{Max: 5, Limit: 10, Start: 4 * time.Second}, 5 * time.Second, 0, 0},
		"the second starts longer": {task.Load{Max: 5, Limit: 10, Start: 4 * time.Second}, task.Load{Max: 5, Limit: 10, Start: 9 * time.Second}, 5 * time.Second, 429, 4 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			r := task.Request{Deadline: t0.Add(tc.left)}
			e := admit(t0, &r, &g, []task.Load{tc.a, tc.b})
			switch {
			case tc.status == 0 && e != nil:
				t.Errorf("refused: %+v", e)
			case tc.status != 0 && (e == nil || e.Status != tc.status || e.RetryAfter != tc.retry):
				t.Errorf("got %+v, want status %d, retry after %v", e, tc.status, tc.retry)
			}
		})
	}
}

// TestAdmissionWaitsForWhatTheJoinNeeds uses a slow branch that matters only if the join waits for
// all branches.
func TestAdmissionWaitsForWhatTheJoinNeeds(t *testing.T) {
	quick := task.Load{Servers: 1, Max: 1, Limit: 100, Service: 10 * time.Millisecond}
	slow := task.Load{Servers: 1, Max: 1, Limit: 100, Service: 10 * time.Second}
	r := task.Request{Deadline: t0.Add(time.Second)}
	for text, refused := range map[string]bool{
		"a>b,c;b>d;c>d;d!1": false, "a>b,c;b>d;c>d;d": true, "a>b,c;b>d;c>d;d!2": true, "a>b,c;b;c": true,
	} {
		g := graph(t, text)
		loads := []task.Load{quick, quick, slow, quick} // stages a, b, c, d
		if e := admit(t0, &r, &g, loads[:len(g.Stages)]); (e != nil) != refused {
			t.Errorf("%s: refused %v, want %v: %v", text, e != nil, refused, e)
		}
	}
}

// TestAdmissionOfAnEndlessLine uses lines whose predicted waits overflow a time.Duration, alone or
// in sum.
func TestAdmissionOfAnEndlessLine(t *testing.T) {
	g := graph(t, "a>b;b>c;c")
	endless := task.Load{Servers: 1, Max: 1, Limit: 1 << 40, Waiting: 1 << 33, Service: time.Hour}
	r := task.Request{Deadline: t0.Add(time.Minute)}
	e := admit(t0, &r, &g, []task.Load{endless, endless, endless})
	if e == nil || e.Status != http.StatusTooManyRequests || e.RetryAfter <= 0 {
		t.Errorf("got %+v, want 429 and a time to come back", e)
	}
}
