//! The queries as circuits.
//!
//! They mean what those of `streams/nexmark` mean, and break ties by the same columns, with these differences:
//!
//! - DBSP updates its answers in each step. q4 and q9 have a row for an auction from its first bid on, and q5 and q7
//!   for a window, and take it back when it changes. The streams of this repository answer when an auction has expired
//!   or a window has ended. After all events, the answers are equal.
//! - q3, q4, q8, q9 and q20 keep all rows that they join, as SQL does. The streams drop bids on expired auctions (q4,
//!   q9), rows that are a window old (q8), and what has met its only partner (q3, q20). Here, q3 and q20 choose people
//!   and auctions before they join, and the streams after.
//! - No event is late. The streams drop late ones; here, a bid on a window that q5 and q7 have forgotten would open it
//!   again. Events are out of order by less than `LATENESS`.
//!
//! Rows are only ever added. So the greatest, the first and the sums of a group are kept without its rows
//! (`chain_aggregate`).

use std::cmp::Ordering;

use anyhow::{Result, bail};
use dbsp::algebra::F64;
use dbsp::dynamic::DynData;
use dbsp::operator::group::CmpFunc;
use dbsp::typed_batch::TypedBox;
use dbsp::utils::{Tup2, Tup3, Tup4, Tup5, Tup6, Tup8};
use dbsp::{OrdIndexedZSet, OrdZSet, RootCircuit, Stream};
use serde_json::json;

use crate::answer::Answer;
use crate::source::Source;

type Rows<K> = Stream<RootCircuit, OrdZSet<K>>;
type Pairs<K, V> = Stream<RootCircuit, OrdIndexedZSet<K, V>>;
type Built = (Vec<Source>, Answer);

const SECOND: i64 = 1_000_000;
const DAY: i64 = 86_400 * SECOND;
/// How much older than the newest event one may be.
const LATENESS: i64 = SECOND;

/// Build the circuit of a query.
///
/// # Errors
///
/// There is no such query.
pub fn build(number: u32, circuit: &mut RootCircuit, is_kept: bool) -> Result<Built> {
    let build = match number {
        0 => q0,
        1 => q1,
        2 => q2,
        3 => q3,
        4 => q4,
        5 => q5,
        7 => q7,
        8 => q8,
        9 => q9,
        17 => q17,
        18 => q18,
        19 => q19,
        20 => q20,
        22 => q22,
        _ => bail!("no circuit for q{number}"),
    };
    Ok(build(circuit, is_kept))
}

/// Bids as they are.
fn q0(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, source) = priced_bids(circuit);
    let answer = Answer::of_rows(&bids, is_kept, |Tup5(auction, bidder, price, date_time, extra)| {
        json!([auction, bidder, price, date_time, extra])
    });
    (vec![source], answer)
}

/// Prices in euros.
fn q1(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, source) = priced_bids(circuit);
    let euros = bids.map(|Tup5(auction, bidder, price, date_time, extra)| {
        Tup5(*auction, *bidder, *date_time, extra.clone(), F64::new(*price as f64 * 0.908))
    });
    let answer = Answer::of_rows(&euros, is_kept, |Tup5(auction, bidder, date_time, extra, price)| {
        json!([auction, bidder, date_time, extra, price.into_inner()])
    });
    (vec![source], answer)
}

fn priced_bids(circuit: &mut RootCircuit) -> (Rows<Tup5<i64, i64, i64, i64, String>>, Source) {
    let (bids, handle) = circuit.add_input_zset();
    let columns = &["auction", "bidder", "price", "date_time", "extra"];
    let source = Source::of_rows("bids", columns, handle, |c, n| {
        Tup5(c.number(0, n), c.number(1, n), c.number(2, n), c.number(3, n), c.text(4, n))
    });
    (bids, source)
}

/// Bids on some auctions.
fn q2(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_zset::<Tup2<i64, i64>>();
    let source = Source::of_rows("bids", &["auction", "price"], handle, |c, n| Tup2(c.number(0, n), c.number(1, n)));
    let some = bids.filter(|Tup2(auction, _)| auction % 123 == 0);
    (vec![source], Answer::of_rows(&some, is_kept, |Tup2(auction, price)| json!([auction, price])))
}

/// Who sells in three states in one category.
fn q3(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (persons, handle) = circuit.add_input_indexed_zset::<i64, Tup3<String, String, String>>();
    let people = Source::of_pairs("persons", &["id", "name", "city", "state"], handle, |c, n| {
        (c.number(0, n), Tup3(c.text(1, n), c.text(2, n), c.text(3, n)))
    });
    let (auctions, handle) = circuit.add_input_indexed_zset::<i64, Tup2<i64, i64>>();
    let sales = Source::of_pairs("auctions", &["seller", "id", "category"], handle, |c, n| {
        (c.number(0, n), Tup2(c.number(1, n), c.number(2, n)))
    });
    let local = persons.filter(|(_, Tup3(_, _, state))| ["OR", "ID", "CA"].contains(&state.as_str()));
    let of_category = auctions.filter(|(_, Tup2(_, category))| *category == 10);
    let joined = of_category.join(&local, |seller, Tup2(id, category), Tup3(name, city, state)| {
        Tup6(*seller, name.clone(), city.clone(), state.clone(), *id, *category)
    });
    let answer = Answer::of_rows(&joined, is_kept, |Tup6(seller, name, city, state, id, category)| {
        json!([seller, name, city, state, id, category])
    });
    (vec![people, sales], answer)
}

/// The mean of the winning bids of each category.
fn q4(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (auctions, handle) = circuit.add_input_indexed_zset::<i64, Tup3<i64, i64, i64>>();
    let sales = Source::of_pairs("auctions", &["id", "category", "date_time", "expires"], handle, |c, n| {
        (c.number(0, n), Tup3(c.number(1, n), c.number(2, n), c.number(3, n)))
    });
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, Tup2<i64, i64>>();
    let offers = Source::of_pairs("bids", &["auction", "price", "date_time"], handle, |c, n| {
        (c.number(0, n), Tup2(c.number(1, n), c.number(2, n)))
    });
    let valid = auctions.join_index(&bids, |id, Tup3(category, opened, expires), Tup2(price, date_time)| {
        (opened <= date_time && date_time <= expires).then_some((Tup2(*id, *category), *price))
    });
    let winning = valid.chain_aggregate(|price, _| *price, |most, price, _| most.max(*price));
    let means = winning.map_index(|(Tup2(_, category), price)| (*category, *price)).aggregate_linear_postprocess(
        |price| Tup2(*price, 1i64),
        |Tup2(total, count)| F64::new(total as f64 / count as f64),
    );
    let answer = Answer::of_pairs(&means, is_kept, |category, mean| json!([category, mean.into_inner()]));
    (vec![sales, offers], answer)
}

/// The auctions with the most bids of ten seconds, every two seconds.
///
/// A step's bids are counted by auction and two seconds, before each count goes to five windows.
fn q5(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, i64>();
    let source = Source::of_pairs("bids", &["date_time", "auction"], handle, |c, n| (c.number(0, n), c.number(1, n)));
    let closed = closed(&bids);
    let panes = bids.map(|(date_time, auction)| Tup2(date_time - date_time.rem_euclid(2 * SECOND), *auction));
    let windows = panes.flat_map_index(|Tup2(pane, auction)| {
        let (pane, auction) = (*pane, *auction);
        (1..=5).map(move |n| (Tup2(pane + 2 * n * SECOND, auction), ()))
    });
    let counts = windows.aggregate_linear_retain_keys(&closed, |Tup2(end, _), closed| end > closed, |()| 1i64);
    counts.accumulate_integrate_trace_retain_keys(&closed, |Tup2(end, _), closed: &i64| end > closed);
    let by_window = counts.map_index(|(Tup2(end, auction), bids)| (*end, Tup2(*bids, *auction))).shard();
    by_window.accumulate_integrate_trace_retain_keys(&closed, |end, closed: &i64| end > closed);
    let most = by_window.topk_rank_custom_order::<MostFirst, _, _, _>(1, |a, b| a.0 == b.0, |_, row| row.clone());
    most.accumulate_integrate_trace_retain_keys(&closed, |end, closed: &i64| end > closed);
    let answer = Answer::of_pairs(&most, is_kept, |end, Tup2(bids, auction)| json!([end, auction, bids]));
    (vec![source], answer)
}

/// Return, in each step, a time before which all windows are complete: as of the step before.
fn closed<V: dbsp::DBData>(rows: &Pairs<i64, V>) -> Stream<RootCircuit, TypedBox<i64, DynData>> {
    rows.waterline_monotonic(|| i64::MIN, |date_time| date_time - LATENESS)
        .transaction_delay_with_initial_value(TypedBox::new(i64::MIN))
}

struct MostFirst;

impl CmpFunc<Tup2<i64, i64>> for MostFirst {
    fn cmp(a: &Tup2<i64, i64>, b: &Tup2<i64, i64>) -> Ordering {
        (b.0, a.1).cmp(&(a.0, b.1))
    }
}

/// The highest bids of each ten seconds; of equal ones on one auction the first.
fn q7(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, Tup3<i64, i64, i64>>();
    let source = Source::of_pairs("bids", &["date_time", "auction", "bidder", "price"], handle, |c, n| {
        (c.number(0, n), Tup3(c.number(1, n), c.number(2, n), c.number(3, n)))
    });
    let closed = closed(&bids);
    let by_auction = bids.map_index(|(date_time, Tup3(auction, bidder, price))| {
        (Tup2(window_end(*date_time), *auction), Tup3(-price, *date_time, *bidder))
    });
    let firsts = by_auction.chain_aggregate(|bid, _| bid.clone(), |first, bid, _| first.min(bid.clone()));
    firsts.accumulate_integrate_trace_retain_keys(&closed, |Tup2(end, _), closed: &i64| end > closed);
    let by_window = firsts
        .map_index(|(Tup2(end, auction), Tup3(lowest, date_time, bidder))| {
            (*end, Tup4(*lowest, *date_time, *bidder, *auction))
        })
        .shard();
    by_window.accumulate_integrate_trace_retain_keys(&closed, |end, closed: &i64| end > closed);
    let highest = by_window.topk_rank_custom_order::<InOrder, _, _, _>(1, |a, b| a.0 == b.0, |_, row| row.clone());
    highest.accumulate_integrate_trace_retain_keys(&closed, |end, closed: &i64| end > closed);
    let answer = Answer::of_pairs(&highest, is_kept, |end, Tup4(lowest, date_time, bidder, auction)| {
        json!([end, auction, -lowest, date_time, bidder])
    });
    (vec![source], answer)
}

struct InOrder;

impl<T: Ord> CmpFunc<T> for InOrder {
    fn cmp(a: &T, b: &T) -> Ordering {
        a.cmp(b)
    }
}

fn window_end(date_time: i64) -> i64 {
    (date_time.div_euclid(10 * SECOND) + 1) * 10 * SECOND
}

/// People who registered and opened an auction within the same ten seconds.
fn q8(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (persons, handle) = circuit.add_input_indexed_zset::<i64, Tup2<i64, String>>();
    let people = Source::of_pairs("persons", &["id", "date_time", "name"], handle, |c, n| {
        (c.number(0, n), Tup2(c.number(1, n), c.text(2, n)))
    });
    let (auctions, handle) = circuit.add_input_zset::<Tup2<i64, i64>>();
    let sales =
        Source::of_rows("auctions", &["seller", "date_time"], handle, |c, n| Tup2(c.number(0, n), c.number(1, n)));
    let registered = persons
        .map_index(|(id, Tup2(date_time, name))| (Tup2(*id, window_end(*date_time)), Tup2(*date_time, name.clone())));
    let opened = auctions.map_index(|Tup2(seller, date_time)| (Tup2(*seller, window_end(*date_time)), ())).distinct();
    let new = registered.join(&opened, |Tup2(id, _), Tup2(date_time, name), ()| Tup3(*id, *date_time, name.clone()));
    let answer = Answer::of_rows(&new, is_kept, |Tup3(id, date_time, name)| json!([id, date_time, name]));
    (vec![people, sales], answer)
}

/// The winning bid of each auction.
fn q9(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (auctions, handle) = circuit.add_input_indexed_zset::<i64, Tup4<i64, i64, i64, i64>>();
    let columns = &["id", "seller", "category", "date_time", "expires"];
    let sales = Source::of_pairs("auctions", columns, handle, |c, n| {
        (c.number(0, n), Tup4(c.number(1, n), c.number(2, n), c.number(3, n), c.number(4, n)))
    });
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, Tup3<i64, i64, i64>>();
    let offers = Source::of_pairs("bids", &["auction", "price", "date_time", "bidder"], handle, |c, n| {
        (c.number(0, n), Tup3(c.number(1, n), c.number(2, n), c.number(3, n)))
    });
    let valid = auctions.join_index(&bids, |id, sale, bid| {
        let (Tup4(seller, category, opened, expires), Tup3(price, date_time, bidder)) = (sale, bid);
        let offer = Tup6(-price, *date_time, *bidder, *seller, *category, *expires);
        (opened <= date_time && date_time <= expires).then_some((*id, offer))
    });
    let winning = valid.chain_aggregate(|offer, _| offer.clone(), |best, offer, _| best.min(offer.clone()));
    let answer = Answer::of_pairs(&winning, is_kept, |id, offer| {
        let Tup6(lowest, date_time, bidder, seller, category, expires) = offer;
        json!([id, seller, category, expires, date_time, bidder, -lowest])
    });
    (vec![sales, offers], answer)
}

/// What was bid on each auction, day by day.
fn q17(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, Tup2<i64, i64>>();
    let source = Source::of_pairs("bids", &["auction", "date_time", "price"], handle, |c, n| {
        (c.number(0, n), Tup2(c.number(1, n), c.number(2, n)))
    });
    let by_day = bids
        .map_index(|(auction, Tup2(date_time, price))| (Tup2(*auction, date_time - date_time.rem_euclid(DAY)), *price));
    let days = by_day.chain_aggregate(
        |price, count| with_bids(Tup8(0, 0, 0, 0, i64::MAX, i64::MIN, F64::new(0.0), 0), *price, count),
        |day, price, count| with_bids(day, *price, count),
    );
    let answer = Answer::of_pairs(&days, is_kept, |Tup2(auction, day), aggregates| {
        let Tup8(bids, rank1, rank2, rank3, least, most, mean, total) = aggregates;
        json!([auction, day, day + DAY, bids, rank1, rank2, rank3, least, most, mean.into_inner(), total])
    });
    (vec![source], answer)
}

/// The number of bids, those of three ranges of prices, the least and highest price, the mean, and the sum.
type Aggregates = Tup8<i64, i64, i64, i64, i64, i64, F64, i64>;

fn with_bids(day: Aggregates, price: i64, count: i64) -> Aggregates {
    let Tup8(bids, rank1, rank2, rank3, least, most, _, total) = day;
    let (bids, total) = (bids + count, total + price * count);
    Tup8(
        bids,
        rank1 + if price < 10_000 { count } else { 0 },
        rank2 + if (10_000..1_000_000).contains(&price) { count } else { 0 },
        rank3 + if price >= 1_000_000 { count } else { 0 },
        least.min(price),
        most.max(price),
        F64::new(total as f64 / bids as f64),
        total,
    )
}

/// Each bidder's newest bid on each auction.
fn q18(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_indexed_zset::<Tup2<i64, i64>, Tup4<i64, i64, String, String>>();
    let columns = &["bidder", "auction", "date_time", "price", "channel", "url"];
    let source = Source::of_pairs("bids", columns, handle, |c, n| {
        let bid = Tup4(c.number(2, n), c.number(3, n), c.text(4, n), c.text(5, n));
        (Tup2(c.number(0, n), c.number(1, n)), bid)
    });
    let newest = bids.chain_aggregate(
        |bid, _| bid.clone(),
        |newest, bid, _| {
            let is_newer = (bid.0, &newest.1, &newest.2, &newest.3) > (newest.0, &bid.1, &bid.2, &bid.3);
            if is_newer { bid.clone() } else { newest }
        },
    );
    let answer = Answer::of_pairs(&newest, is_kept, |Tup2(bidder, auction), Tup4(date_time, price, channel, url)| {
        json!([bidder, auction, date_time, price, channel, url])
    });
    (vec![source], answer)
}

/// The ten highest bids on each auction. All bids are kept.
fn q19(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, Tup4<i64, i64, i64, String>>();
    let source = Source::of_pairs("bids", &["auction", "price", "date_time", "bidder", "channel"], handle, |c, n| {
        (c.number(0, n), Tup4(-c.number(1, n), c.number(2, n), c.number(3, n), c.text(4, n)))
    });
    let highest = bids.topk_asc(10);
    let answer = Answer::of_pairs(&highest, is_kept, |auction, Tup4(lowest, date_time, bidder, channel)| {
        json!([auction, -lowest, date_time, bidder, channel])
    });
    (vec![source], answer)
}

/// Bids on auctions of one category, with what is known of them.
fn q20(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (auctions, handle) = circuit.add_input_indexed_zset::<i64, Tup5<String, i64, i64, i64, i64>>();
    let columns = &["id", "item", "initial_bid", "expires", "seller", "category"];
    let sales = Source::of_pairs("auctions", columns, handle, |c, n| {
        (c.number(0, n), Tup5(c.text(1, n), c.number(2, n), c.number(3, n), c.number(4, n), c.number(5, n)))
    });
    let (bids, handle) = circuit.add_input_indexed_zset::<i64, Tup4<i64, i64, i64, String>>();
    let offers = Source::of_pairs("bids", &["auction", "bidder", "price", "date_time", "url"], handle, |c, n| {
        (c.number(0, n), Tup4(c.number(1, n), c.number(2, n), c.number(3, n), c.text(4, n)))
    });
    let of_category = auctions.filter(|(_, sale)| sale.4 == 10);
    let joined = of_category.join_index(&bids, |id, sale, bid| Some((*id, Tup2(sale.clone(), bid.clone()))));
    let answer = Answer::of_pairs(&joined, is_kept, |auction, Tup2(sale, bid)| {
        let (Tup5(item, initial_bid, expires, seller, category), Tup4(bidder, price, date_time, url)) = (sale, bid);
        json!([auction, item, initial_bid, expires, seller, category, bidder, price, date_time, url])
    });
    (vec![sales, offers], answer)
}

/// The directories of each bid's URL.
fn q22(circuit: &mut RootCircuit, is_kept: bool) -> Built {
    let (bids, handle) = circuit.add_input_zset::<Tup5<i64, i64, i64, String, String>>();
    let source = Source::of_rows("bids", &["auction", "bidder", "price", "channel", "url"], handle, |c, n| {
        Tup5(c.number(0, n), c.number(1, n), c.number(2, n), c.text(3, n), c.text(4, n))
    });
    let split = bids.map(|Tup5(auction, bidder, price, channel, url)| {
        let mut parts = url.split('/').skip(3).map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        Tup5(*auction, *bidder, *price, channel.clone(), Tup3(next(), next(), next()))
    });
    let answer = Answer::of_rows(&split, is_kept, |Tup5(auction, bidder, price, channel, Tup3(dir1, dir2, dir3))| {
        json!([auction, bidder, price, channel, dir1, dir2, dir3])
    });
    (vec![source], answer)
}
