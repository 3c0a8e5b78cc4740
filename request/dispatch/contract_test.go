package dispatch_test

import (
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// The interfaces through which other packages use a Shell, and a Shell uses them.
var (
	_ cluster.Lines    = (*dispatch.Shell)(nil)
	_ cluster.Replicas = (*dispatch.Shell)(nil)
	_ flow.Loads       = (*dispatch.Shell)(nil)
	_ dispatch.Bus     = (*queue.Bus)(nil)
	_ dispatch.Store   = (*tensor.Dir)(nil)
)
