package autoscaler

func trainedWeights() AttentionWeights { return AttentionWeights{Own: [AttentionFeatures]float64{1}} }
