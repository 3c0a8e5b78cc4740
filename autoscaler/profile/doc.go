// Package profile holds how long a function takes, by CPU quota, batch size and input length. A
// [Profile] is stored with the function, and policies see it as points of a Snapshot.
//
// The command stagecoach profile makes the measurements. This package has the pure parts:
//
//   - [Cells] returns the sampling plan.
//   - [Series] holds the service times of a cell, and estimates the error of their mean by batch
//     means. Single times are not independent: a replica at its quota is stopped for tens of
//     milliseconds, and such a stop makes several calls slower.
//   - [Fit] is the regression of service time on the inverse of the quota.
package profile
