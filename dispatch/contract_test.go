package dispatch_test

import (
	"github.com/stagecoach-serving/stagecoach/cluster"
	"github.com/stagecoach-serving/stagecoach/dispatch"
	"github.com/stagecoach-serving/stagecoach/flow"
	"github.com/stagecoach-serving/stagecoach/queue"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// What other rooms want of a Shell, and a Shell of them.
var (
	_ cluster.Lines    = (*dispatch.Shell)(nil)
	_ cluster.Replicas = (*dispatch.Shell)(nil)
	_ flow.Loads       = (*dispatch.Shell)(nil)
	_ dispatch.Bus     = (*queue.Bus)(nil)
	_ dispatch.Store   = (*tensor.Dir)(nil)
)
