// How results of the search are scored and shown: Sphinx puts this before its own code.
//
// A result for a word of words.py has the title of its page. Here it gets the form of a result for
// a name, so that the two are one in the list. A word that is typed in part comes after names.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: (result) => {
    const [, title, anchor, , score, , kind] = result;
    if (kind !== "index") return score;
    if (anchor.startsWith("#jgrad.")) {
      const name = anchor.slice(1);
      const object = Search._index.objects.jgrad.find((x) => `jgrad.${x[4]}` === name);
      const type = object ? Search._index.objnames[object[1]][2] : "Python attribute";
      result[1] = name;
      result[3] = `${type}, in ${title}`;
    }
    return score < 100 ? score / 10 : score;
  },
};
