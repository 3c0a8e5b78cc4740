// Package profile is what is known of how long a function takes, by CPU quota, batch size and length of its input: a [Profile]
// is stored with the function, and policies see it as points of a Snapshot.
//
// Measuring is a shell's work (cmd/stagecoach, profile); what is pure of it is here. [Cells] is the sampling plan. A [Series] holds a
// cell's service times and says how well their mean is known, by batch means, since a replica at its quota is stopped for tens of
// milliseconds at a time and neighbouring calls share that. [Fit] is the regression of service time on the inverse of the quota.
package profile
