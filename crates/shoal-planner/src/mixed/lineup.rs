//! In which groups the devices of a fleet may stand one behind the other. A group's devices are of one node, since its
//! members move parameters and gradients between them; a node is one group or several in a row.

use shoal_fleet::Fleet;

/// Fleets of so few nodes that they are tried in every order, each cut into groups by itself.
pub(super) const FEW_NODES: usize = 2;

/// Groups in the order of their stages.
pub(super) type Lineup = Vec<Vec<usize>>;

/// How often pieces may pass all groups: where each has several stages, the first piece is at the last group sooner, and less
/// of the step is spent filling and draining.
const TURNS: [usize; 2] = [2, 3];
/// Lineups of no more groups are passed so often.
const GROUPS_IN_TURN_MOST: usize = 12;

/// A lineup that pieces pass several times, each group having as many stages.
pub(super) fn in_turns(lineup: &Lineup) -> Vec<Lineup> {
    match (2..=GROUPS_IN_TURN_MOST).contains(&lineup.len()) {
        true => TURNS.into_iter().map(|turns| vec![&lineup[..]; turns].concat()).collect(),
        false => Vec::new(),
    }
}

/// All in which every group has one stage that are worth a look; `speeds` by device.
pub(super) fn lineups(fleet: &Fleet, speeds: &[f64]) -> Vec<Lineup> {
    let few = fleet.nodes.len() <= FEW_NODES;
    let nodes: Vec<usize> = (0..fleet.nodes.len()).collect();
    let orders = if few { every_order(&nodes) } else { likely_orders(fleet, speeds) };
    let ways: Vec<Vec<Lineup>> = nodes.iter().map(|node| ways(fleet, *node, speeds)).collect();
    let mut found: Vec<Lineup> = Vec::new();
    for order in orders {
        let lines: Vec<Lineup> = if few {
            around(&order, &ways)
        } else {
            // All nodes into as many groups, as far as their devices go.
            let most = ways.iter().map(Vec::len).max().unwrap_or(0);
            let same = |way: usize| {
                order.iter().flat_map(|node| ways[*node][way.min(ways[*node].len() - 1)].clone()).collect()
            };
            (0..most).map(same).collect()
        };
        for line in lines {
            if !found.contains(&line) {
                found.push(line);
            }
        }
    }
    found
}

/// Every way of each node, behind every way of those before it. The first node's groups may stand at both ends: so
/// layers that share a tensor may be in one node.
fn around(order: &[usize], ways: &[Vec<Lineup>]) -> Vec<Lineup> {
    let Some((first, rest)) = order.split_first() else { return Vec::new() };
    let inner = rest.iter().fold(vec![Vec::new()], |lines: Vec<Lineup>, node| {
        let longer = |line: &Lineup| {
            let line = line.clone();
            ways[*node].iter().map(move |way| [line.clone(), way.clone()].concat())
        };
        lines.iter().flat_map(longer).collect()
    });
    let mut found = Vec::new();
    for outer in &ways[*first] {
        for front in 1..=outer.len() {
            // Without others there are no ends.
            if front == outer.len() || !rest.is_empty() {
                let (front, back) = outer.split_at(front);
                found.extend(inner.iter().map(|inner| [front, inner, back].concat()));
            }
        }
    }
    found
}

/// Groups of a node, beside each device by itself.
const GROUPS_MOST: usize = 4;

/// A node's devices as one group, as several of about the same size, and each by itself. Quick ones stand together, or
/// are spread over the groups.
fn ways(fleet: &Fleet, node: usize, speeds: &[f64]) -> Vec<Lineup> {
    let mut devices: Vec<usize> = fleet.nodes[node].devices.clone().collect();
    devices.sort_by(|a, b| speeds[*b].total_cmp(&speeds[*a]));
    let mut found: Vec<Lineup> = Vec::new();
    for groups in (1..=devices.len()).filter(|count| *count <= GROUPS_MOST || *count == devices.len()) {
        let bound = |group: usize| devices.len() * group / groups;
        let together: Lineup =
            (0..groups).map(|group| devices[bound(group)..bound(group + 1)].to_vec()).collect();
        let spread: Lineup =
            (0..groups).map(|group| devices.iter().copied().skip(group).step_by(groups).collect()).collect();
        let same = |device: &usize| fleet.devices[*device].kind == fleet.devices[devices[0]].kind;
        let found_here = if devices.iter().all(same) { vec![together] } else { vec![together, spread] };
        for mut way in found_here {
            way.iter_mut().for_each(|group| group.sort_unstable());
            let kinds = |way: &Lineup| -> Vec<Vec<&str>> {
                let kind = |device: &usize| fleet.devices[*device].kind.as_str();
                way.iter().map(|group| group.iter().map(kind).collect()).collect()
            };
            if found.iter().all(|other| kinds(other) != kinds(&way)) {
                found.push(way);
            }
        }
    }
    found
}

fn every_order(nodes: &[usize]) -> Vec<Vec<usize>> {
    nodes.iter().fold(vec![Vec::new()], |orders: Vec<Vec<usize>>, node| {
        let with = |order: &Vec<usize>| {
            let order = order.clone();
            (0..=order.len()).map(move |place| {
                let mut order = order.clone();
                order.insert(place, *node);
                order
            })
        };
        orders.iter().flat_map(with).collect()
    })
}

/// As the fleet names them, and by how many devices they have: small groups fill a pipeline sooner.
fn likely_orders(fleet: &Fleet, speeds: &[f64]) -> Vec<Vec<usize>> {
    let named: Vec<usize> = (0..fleet.nodes.len()).collect();
    let speed =
        |node: &usize| -> f64 { fleet.nodes[*node].devices.clone().map(|device| speeds[device]).sum() };
    let (mut small_first, mut quick_first) = (named.clone(), named.clone());
    small_first.sort_by_key(|node| fleet.nodes[*node].devices.len());
    quick_first.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    let mut orders = vec![named];
    for order in [small_first, quick_first] {
        let reversed = order.iter().rev().copied().collect();
        for order in [order, reversed] {
            if !orders.contains(&order) {
                orders.push(order);
            }
        }
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(nodes: &[&str]) -> Fleet {
        let node = |(number, devices): (usize, &&str)| {
            format!(
                "[[node]]\nname = \"n{number}\"\nhost_memory = \"64 GiB\"\nnetwork = \"10 Gbit/s\"\ndevices = [{devices}]\n"
            )
        };
        Fleet::parse(&nodes.iter().enumerate().map(node).collect::<String>(), "fleet").unwrap()
    }

    #[test]
    fn every_device_stands_in_one_group_of_its_node() {
        let (four, mixed) =
            (r#"{ kind = "T4", count = 4 }"#, r#"{ kind = "T4" }, { kind = "V100", count = 2 }"#);
        for nodes in [vec![four], vec![four, mixed], vec![mixed, four, mixed]] {
            let fleet = fleet(&nodes);
            let all = lineups(&fleet, &vec![1.0; fleet.devices.len()]);
            for lineup in &all {
                let mut devices = lineup.concat();
                devices.sort_unstable();
                assert_eq!(devices, (0..fleet.devices.len()).collect::<Vec<_>>());
                let apart =
                    |group: &Vec<usize>| group.iter().any(|device| !fleet.same_node(group[0], *device));
                assert!(!lineup.iter().any(apart), "{lineup:?}");
            }
            let distinct: std::collections::BTreeSet<_> = all.iter().collect();
            assert_eq!(distinct.len(), all.len());
        }
    }

    #[test]
    fn a_node_may_stand_at_both_ends() {
        let pair = r#"{ kind = "T4", count = 2 }"#;
        let all = lineups(&fleet(&[pair, pair]), &[1.0; 4]);
        assert!(all.contains(&vec![vec![0], vec![2, 3], vec![1]]));
        assert!(all.contains(&vec![vec![2], vec![0], vec![1], vec![3]]));
    }
}
