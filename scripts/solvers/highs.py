"""Solves plans of variants with HiGHS, to compare package accuracy with.

Reads one problem of package accuracy per line, as JSON, and writes one result per line: the cost of
each of the four goals, and whether HiGHS has proved all of them. The model is built from the
problem alone, and differs from that of the package: it has flows per chain from the root to a leaf,
and a binary variable per batch. HIGHS_PRESOLVE=off solves without HiGHS's presolve.
"""

import itertools
import json
import os
import sys
import time

import highspy

SECONDS = 60.0  # per problem
SLACK = 1e-7  # by which a later goal may spoil an earlier one


class Model:
    def __init__(self, problem):
        self.p = problem
        self.h = highspy.Highs()
        self.h.silent()
        for option, value in {
            "mip_rel_gap": 0.0,
            "mip_abs_gap": 0.0,
            "primal_feasibility_tolerance": 1e-9,
            "dual_feasibility_tolerance": 1e-9,
            "mip_feasibility_tolerance": 1e-9,
            "threads": 1,
            "random_seed": 1,
            "presolve": os.environ.get("HIGHS_PRESOLVE", "choose"),
        }.items():
            self.h.setOptionValue(option, value)
        self.columns = 0
        self.goals = [{}, {}, {}, {}]
        self.replicas = {}  # (stage, variant, batch) -> column
        self.load = {}
        self.offset = 0
        self.add_replicas()
        for pipeline in problem["Pipelines"]:
            self.add_pipeline(pipeline)
        self.add_capacity()

    def column(self, low, high, integer=False):
        self.h.addVar(low, high)
        if integer:
            self.h.changeColIntegrality(self.columns, highspy.HighsVarType.kInteger)
        self.columns += 1
        return self.columns - 1

    def row(self, low, high, entries):
        entries = {c: v for c, v in entries.items() if v}
        self.h.addRow(low, high, len(entries), list(entries), list(entries.values()))

    def variants(self):
        for i, stage in enumerate(self.p["Stages"]):
            for k, variant in enumerate(stage["Variants"]):
                yield i, k, variant

    def add_replicas(self):
        least = sum(v.get("Least", 0) for _, _, v in self.variants())
        total = max(self.p["Replicas"], least)
        everything = {}
        for i, k, v in self.variants():
            most = min(total, v.get("Most") or total)
            chosen, of = {}, {}
            for b in range(len(v["Batches"])):
                n = self.column(0, most, True)
                y = self.column(0, 1, True)
                self.row(-highspy.kHighsInf, 0, {n: 1, y: -most})
                self.replicas[i, k, b] = n
                self.load[i, k, b] = {}
                chosen[y], of[n], everything[n] = 1, 1, 1
                self.goals[2][n] = v.get("Price") or 1
            self.row(-highspy.kHighsInf, 1, chosen)
            self.row(v.get("Least", 0), most, of)
            if self.p.get("CountChanges"):
                more, fewer = self.column(0, 1e6), self.column(0, 1e6)
                self.row(v.get("Running", 0), v.get("Running", 0), {**of, more: -1, fewer: 1})
                self.goals[3].update({more: 1, fewer: 1})
        self.row(-highspy.kHighsInf, total, everything)

    def add_pipeline(self, p):
        steps = p.get("Steps") or []
        demand = sum(q["Demand"] for q in self.p["Pipelines"])
        paths = [[p["Root"]]]
        while True:
            longer = []
            for path in paths:
                out = [s["To"] for s in steps if s["From"] == path[-1]]
                longer += [path + [to] for to in out] or [path]
            if longer == paths:
                break
            paths = longer
        branch = {(s["From"], s["To"]): s.get("Branch") or 1 for s in steps}
        whole = {(s["From"], s["To"]) for s in steps if s.get("Whole")}
        flows = [self.chains(p, path) for path in paths]
        weight = p["Demand"] / demand
        self.row(-highspy.kHighsInf, 1, {c: 1 for c in flows[0].values()})
        mean = {}
        for leaf, path in enumerate(paths):
            for chain, c in flows[leaf].items():
                accuracy = self.accuracy(path, chain) / len(paths)
                self.goals[1][c] = -weight * accuracy
                mean[c] = mean.get(c, 0) + accuracy
                if leaf == 0:
                    self.goals[0][c] = -weight
                    mean[c] -= p.get("MinAccuracy", 0)
        if p.get("MinAccuracy"):
            self.row(0, highspy.kHighsInf, mean)
        seen = {}
        for leaf, path in enumerate(paths):
            for n in range(1, len(path) + 1):
                prefix = tuple(path[:n])
                if prefix in seen:
                    self.agree(flows[seen[prefix]], flows[leaf], n)
                    continue
                seen[prefix] = leaf
                for chain, c in flows[leaf].items():
                    items = p["Demand"]
                    for at in range(1, n):
                        k, _ = chain[at - 1]
                        factor = self.p["Stages"][path[at - 1]]["Variants"][k].get("Factor") or 1
                        step = path[at - 1], path[at]
                        items *= branch[step] * (1 if step in whole else factor)
                    k, b = chain[n - 1]
                    load = self.load[path[n - 1], k, b]
                    load[c] = load.get(c, 0) + items / self.rate(path[n - 1], k, b)

    def rate(self, i, k, b):
        batch = self.p["Stages"][i]["Variants"][k]["Batches"][b]
        return batch.get("Rate") or batch["Size"] / batch["Time"]

    def accuracy(self, path, chain):
        product = 1.0
        for i, (k, _) in zip(path, chain):
            product *= self.p["Stages"][i]["Variants"][k]["Accuracy"]
        return product

    def chains(self, p, path):
        options = []
        for i in path:
            variants = self.p["Stages"][i]["Variants"]
            options.append([(k, b) for k, v in enumerate(variants) for b in range(len(v["Batches"]))])
        out = {}
        for chain in itertools.product(*options):
            time_ = sum(self.p["Stages"][i]["Variants"][k]["Batches"][b]["Time"] for i, (k, b) in zip(path, chain))
            if time_ / (1 - p["Queueing"]) + p["Hop"] * len(path) <= p["Objective"] * (1 + 1e-12):
                out[chain] = self.column(0, 1)
        return out

    def agree(self, a, b, n):
        sums = {}
        for flows, sign in (a, 1), (b, -1):
            for chain, c in flows.items():
                row = sums.setdefault(chain[:n], {})
                row[c] = row.get(c, 0) + sign
        for row in sums.values():
            self.row(0, 0, row)

    def add_capacity(self):
        for key, load in self.load.items():
            self.row(-highspy.kHighsInf, 0, {**load, self.replicas[key]: -1})

    def solve(self):
        end = time.monotonic() + SECONDS
        costs, proved = [], True
        for goal in range(4 if self.p.get("CountChanges") else 3):
            for c in range(self.columns):
                self.h.changeColCost(c, self.goals[goal].get(c, 0.0))
            self.h.setOptionValue("time_limit", max(end - time.monotonic(), 0.1) + self.h.getRunTime())
            self.h.run()
            proved = proved and self.h.getModelStatus() == highspy.HighsModelStatus.kOptimal
            if not proved:
                return {"Proved": False}
            cost = self.h.getInfo().objective_function_value
            costs.append(cost)
            self.row(-highspy.kHighsInf, cost + SLACK * max(1, abs(cost)), self.goals[goal])
        return {"Proved": True, "Costs": costs}


# HiGHS prints a banner to the standard output, which only results may go to.
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    print(json.dumps(Model(json.loads(line)).solve()), file=results, flush=True)
