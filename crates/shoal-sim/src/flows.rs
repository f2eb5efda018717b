//! Transfers under way. Each passes some resources (a link's one direction, a host's memory), which divide what they
//! carry evenly among those that pass; a transfer is as fast as the least of its shares.

/// A number of a transfer, reused after its end.
pub type Flow = usize;

struct Under {
    bytes_left: f64,
    rate: f64,
    since: f64,
    resources: Vec<u32>,
    /// Raised whenever its end changes: ends that were foreseen before are void.
    version: u32,
    is_under_way: bool,
}

/// An end as it is foreseen now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct End {
    pub at: f64,
    pub flow: Flow,
    pub version: u32,
}

pub struct Flows {
    /// Bytes a second of each resource.
    capacities: Vec<f64>,
    /// Who passes each.
    passing: Vec<Vec<Flow>>,
    flows: Vec<Under>,
    free: Vec<Flow>,
}

impl Flows {
    pub fn new(capacities: Vec<f64>) -> Flows {
        let passing = vec![Vec::new(); capacities.len()];
        Flows { capacities, passing, flows: Vec::new(), free: Vec::new() }
    }

    /// Begins a transfer; the ends that change are given to `foresee`, its own among them.
    pub fn begin(&mut self, now: f64, bytes: f64, resources: &[u32], foresee: &mut impl FnMut(End)) -> Flow {
        let under = Under {
            bytes_left: bytes,
            rate: f64::INFINITY,
            since: now,
            resources: resources.to_vec(),
            version: 0,
            is_under_way: true,
        };
        let flow = match self.free.pop() {
            Some(flow) => {
                let version = self.flows[flow].version + 1;
                self.flows[flow] = Under { version, ..under };
                flow
            }
            None => {
                self.flows.push(under);
                self.flows.len() - 1
            }
        };
        for resource in resources {
            self.passing[*resource as usize].push(flow);
        }
        self.share_anew(now, resources, foresee);
        flow
    }

    /// Whether an end that was foreseen has come; then the transfer is over and others go faster.
    pub fn end(&mut self, end: End, foresee: &mut impl FnMut(End)) -> bool {
        let under = &mut self.flows[end.flow];
        if !under.is_under_way || under.version != end.version {
            return false;
        }
        under.is_under_way = false;
        let resources = std::mem::take(&mut under.resources);
        for resource in &resources {
            self.passing[*resource as usize].retain(|flow| *flow != end.flow);
        }
        self.free.push(end.flow);
        self.share_anew(end.at, &resources, foresee);
        true
    }

    /// Rates of all that pass some resources.
    fn share_anew(&mut self, now: f64, resources: &[u32], foresee: &mut impl FnMut(End)) {
        for resource in resources {
            for place in 0..self.passing[*resource as usize].len() {
                let flow = self.passing[*resource as usize][place];
                let rate = self.rate(flow);
                let under = &mut self.flows[flow];
                if rate == under.rate {
                    continue;
                }
                if under.rate.is_finite() {
                    under.bytes_left = (under.bytes_left - (now - under.since) * under.rate).max(0.0);
                }
                (under.rate, under.since) = (rate, now);
                under.version += 1;
                foresee(End { at: now + under.bytes_left / rate, flow, version: under.version });
            }
        }
    }

    fn rate(&self, flow: Flow) -> f64 {
        let shares = self.flows[flow].resources.iter().map(|resource| {
            let resource = *resource as usize;
            self.capacities[resource] / self.passing[resource].len() as f64
        });
        shares.fold(f64::MAX, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays transfers of (begin, bytes, resources) through; their ends.
    fn play(capacities: &[f64], transfers: &[(f64, f64, &[u32])]) -> Vec<f64> {
        let mut flows = Flows::new(capacities.to_vec());
        let mut foreseen: Vec<End> = Vec::new();
        let mut of = std::collections::HashMap::new();
        let mut ends = vec![0.0; transfers.len()];
        let mut next = 0;
        loop {
            foreseen.sort_by(|a, b| b.at.total_cmp(&a.at));
            let begins = transfers.get(next).map(|transfer| transfer.0);
            match (begins, foreseen.last().copied()) {
                (Some(at), end) if end.is_none_or(|end| at <= end.at) => {
                    let (_, bytes, resources) = transfers[next];
                    let flow = flows.begin(at, bytes, resources, &mut |end| foreseen.push(end));
                    of.insert(flow, next);
                    next += 1;
                }
                (_, Some(end)) => {
                    foreseen.pop();
                    if flows.end(end, &mut |end| foreseen.push(end)) {
                        ends[of[&end.flow]] = end.at;
                    }
                }
                (_, None) => return ends,
            }
        }
    }

    #[test]
    fn those_that_pass_share() {
        // Alone at 10 bytes a second; two from 0 on; one that joins halfway.
        assert_eq!(play(&[10.0], &[(0.0, 100.0, &[0])]), [10.0]);
        assert_eq!(play(&[10.0], &[(0.0, 100.0, &[0]), (0.0, 100.0, &[0])]), [20.0, 20.0]);
        assert_eq!(play(&[10.0], &[(0.0, 100.0, &[0]), (5.0, 50.0, &[0])]), [15.0, 15.0]);
        // The narrower of two resources decides; the wider is not held up by it.
        assert_eq!(play(&[10.0, 5.0], &[(0.0, 50.0, &[0, 1]), (0.0, 50.0, &[0])]), [10.0, 10.0]);
        // After one ends, the other has all.
        assert_eq!(play(&[10.0], &[(0.0, 20.0, &[0]), (0.0, 100.0, &[0])]), [4.0, 12.0]);
    }
}
