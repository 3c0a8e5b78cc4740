// Package profile holds how long a function takes, by CPU quota, batch size and input length. A
// [Profile] is stored with the function, and policies see it as points of a Snapshot.
//
// The command stagecoach profile measures. The pure parts are here. [Cells] is the sampling plan. A
// [Series] holds a cell's service times, and estimates the error of their mean by batch means.
// Single times are not independent: a replica at its quota is stopped for tens of milliseconds, and
// neighbouring calls share that. [Fit] is the regression of service time on the inverse of the
// quota.
package profile
